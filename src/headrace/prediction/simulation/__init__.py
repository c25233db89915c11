"""Runs in virtual time: the schedules, shards, leases and policies of real runs, with computed times."""
