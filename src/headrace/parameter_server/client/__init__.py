"""A worker's side: push, pull, and data leases."""
