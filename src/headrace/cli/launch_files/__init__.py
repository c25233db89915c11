"""Writes what SLURM, Kubernetes and torchrun start a job from."""
