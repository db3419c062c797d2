"""Models of named sizes, whose initial parameters are a function of the size and a seed alone."""
