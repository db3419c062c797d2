"""What several claims are measured with: training on threads, grids of trials, problems solved exactly, pictures."""
