"""Strategies that wrap another one, to measure or to change what it does."""
