"""Layers that several devices divide."""
