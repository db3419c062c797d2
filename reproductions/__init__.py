# SPDX-License-Identifier: Apache-2.0
"""The papers' claims, checked on one machine against the papers' own baselines."""
