# SPDX-License-Identifier: Apache-2.0
"""What a strategy works on: one worker's parameters as a flat vector, its state and its operations in flight."""
