"""Codecs: compress a vector into a payload, and decompress it."""
