# SPDX-License-Identifier: Apache-2.0
"""Codecs: compress a vector into a payload, and decompress it."""
