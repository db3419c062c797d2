"""Stochastic gradient push: averages on directed graphs, with weights that correct their bias."""
