# SPDX-License-Identifier: Apache-2.0
"""Strategies that pull workers towards the best of them."""
