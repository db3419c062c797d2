# SPDX-License-Identifier: Apache-2.0
"""Strategies: when workers send what to each other. One file per method; recipes find them there."""

from thinwire.methods.strategies.base import Strategy

__all__ = ["Strategy"]
