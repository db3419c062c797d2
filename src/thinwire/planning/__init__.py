# SPDX-License-Identifier: Apache-2.0
"""Predictions before a run: the doctor, the planner and the simulator."""
