# SPDX-License-Identifier: Apache-2.0
"""Strategies that average parameters with neighbours on a graph."""
