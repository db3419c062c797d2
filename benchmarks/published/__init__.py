# SPDX-License-Identifier: Apache-2.0
"""Published measurements of real clusters, predicted by the strategies' own code."""
