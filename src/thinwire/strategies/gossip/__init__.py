"""Strategies that average parameters with neighbours on a graph."""
