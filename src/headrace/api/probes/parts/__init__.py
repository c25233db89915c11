"""Is what users bring the same over parts of a batch?"""
