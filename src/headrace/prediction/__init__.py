"""Predictions: what a job costs on machines that were measured, or only described."""
