"""Watches the collectives of devices, which wait in silence."""
