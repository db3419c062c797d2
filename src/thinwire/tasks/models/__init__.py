"""Models of named sizes, whose first parameters are a function of the size and a seed alone."""
