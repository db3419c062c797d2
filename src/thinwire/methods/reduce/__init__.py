# SPDX-License-Identifier: Apache-2.0
"""Means over all ranks and over neighbours, of plain and of compressed vectors."""
