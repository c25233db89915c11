"""Transforms for `InputPipeline.map`."""
