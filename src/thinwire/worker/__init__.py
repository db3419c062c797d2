"""A model and an optimizer become a worker: hooks, buckets, checkpoints, uneven data."""
