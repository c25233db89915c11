"""Blocks of a model that run again in backward, so that what they compute need not be kept."""
