# SPDX-License-Identifier: Apache-2.0
"""Examines the machines and links of a distributed job, and says in words what slows it down or will break it."""
