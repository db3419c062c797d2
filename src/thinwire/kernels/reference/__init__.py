"""What the kernels compute, in a few torch operations each: the yardstick of the compiled ones, and their fallback."""
