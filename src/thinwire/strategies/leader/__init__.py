"""Strategies that pull workers towards the best of them."""
