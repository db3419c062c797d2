# SPDX-License-Identifier: Apache-2.0
"""Strategies that do not wait for slow workers."""
