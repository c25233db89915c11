"""Stages of models whose forward is no graph: each runs all of it, without the modules of the others."""
