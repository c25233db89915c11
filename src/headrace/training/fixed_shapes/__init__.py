"""Steps whose shapes never change, as devices need that compile a program for every shape."""
