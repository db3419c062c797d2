# SPDX-License-Identifier: Apache-2.0
"""Hooks for PyTorch's own data-parallel wrappers."""
