"""Strategies that measure or change what another strategy does."""
