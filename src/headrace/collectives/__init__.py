"""How bytes move among all workers: all-reduce, broadcast, barrier."""
