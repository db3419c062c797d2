# SPDX-License-Identifier: Apache-2.0
"""What is known before a run: the doctor, the planner and the simulator."""
