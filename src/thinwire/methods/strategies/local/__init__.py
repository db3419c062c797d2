# SPDX-License-Identifier: Apache-2.0
"""Strategies that average parameters every few steps."""
