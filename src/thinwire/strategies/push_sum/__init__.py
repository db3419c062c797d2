"""Stochastic gradient push: directed graphs and weights that correct for them."""
