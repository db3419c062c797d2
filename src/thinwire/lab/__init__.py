# SPDX-License-Identifier: Apache-2.0
"""The bench behind `thinwire train` and `thinwire compare`: tasks, emulated networks, runs and their reports."""
