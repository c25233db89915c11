"""Workers that another launcher has started: torchrun, SLURM, MPI."""
