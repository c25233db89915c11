"""One copy of the parameters, and of the optimizer's state, for all workers of a host."""
