"""Trains a copy of a job for a while, to find out what it needs: a learning rate, the steps to a goal."""
