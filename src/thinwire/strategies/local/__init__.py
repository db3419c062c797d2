"""Strategies that average parameters every few steps."""
