# SPDX-License-Identifier: Apache-2.0
"""Strategies that average parameters with neighbors on a graph."""
