"""Hooks for PyTorch's own data-parallel wrappers."""
