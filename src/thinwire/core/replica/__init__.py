# SPDX-License-Identifier: Apache-2.0
"""One worker's parameters as a flat vector, with the strategy's state and operations in flight."""
