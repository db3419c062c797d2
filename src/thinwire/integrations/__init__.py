"""Hooks for the data-parallel wrappers of torch itself."""
