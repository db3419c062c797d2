# SPDX-License-Identifier: Apache-2.0
"""Examples: reading them, drawing batches of them, and splitting them among workers."""
