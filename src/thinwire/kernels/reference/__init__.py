"""What the kernels compute, in a few torch operations each: the baseline of the compiled ones, and their fallback."""
