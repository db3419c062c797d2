# SPDX-License-Identifier: Apache-2.0
"""Strategies that wrap another one, to measure or to change its behavior."""
