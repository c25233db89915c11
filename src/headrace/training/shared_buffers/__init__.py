"""Buffers that workers make one: those that forward changes, and the running statistics of BatchNorm."""
