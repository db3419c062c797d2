# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient push: averages on directed graphs, with weights that correct their bias."""
