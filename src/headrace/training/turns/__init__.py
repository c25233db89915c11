"""Sets of parameters that are trained in turns, each by a compute and an exchange of its own."""
