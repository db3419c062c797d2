"""Strategies that exchange gradients at every step."""
