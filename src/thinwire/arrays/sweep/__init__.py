# SPDX-License-Identifier: Apache-2.0
"""Sweeps: many trials of a task, trained as arrays."""
