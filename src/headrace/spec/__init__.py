"""Frozen values that describe a job, a model, a cluster, a plan and events. No torch at run time."""
