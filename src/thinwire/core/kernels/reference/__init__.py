# SPDX-License-Identifier: Apache-2.0
"""The definition of every kernel in a few operations of torch: tests compare with it, and it is the fallback."""
