# SPDX-License-Identifier: Apache-2.0
"""Strategies that exchange gradients at every step."""
