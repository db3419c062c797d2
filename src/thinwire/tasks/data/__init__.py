"""Examples: reading them, drawing batches of them, and splitting them among workers."""
