"""This machine: what it has, what it refuses, how it is called."""
