# SPDX-License-Identifier: Apache-2.0
"""Means over all ranks and over neighbors, of plain and of compressed vectors."""
