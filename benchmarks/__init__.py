# SPDX-License-Identifier: Apache-2.0
"""Paired benchmarks: contenders take turns in the same processes, and ratios are reported with their spread."""
