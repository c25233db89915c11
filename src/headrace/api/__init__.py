"""The functions that a user calls, and what they check before a run starts."""
