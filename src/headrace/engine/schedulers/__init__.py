"""SLURM, MPI and Kubernetes: what they say of a process that they have started."""
