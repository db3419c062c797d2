"""Strategies that do not wait for the slowest worker."""
