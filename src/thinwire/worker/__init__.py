# SPDX-License-Identifier: Apache-2.0
"""A model and an optimizer become a worker: hooks, gradient buckets, checkpoints, uneven data."""
