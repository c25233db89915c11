"""L-BFGS whose vectors live on the servers: the solver, which has no tensors, and what the servers carry out for it."""
