"""Strategies that do not wait for slow workers."""
