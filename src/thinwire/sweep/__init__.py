"""Sweeps: many trials of a task, trained as arrays."""
