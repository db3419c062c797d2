"""A model and an optimizer become a worker: hooks, gradient buckets, checkpoints, uneven data."""
