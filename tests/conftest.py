"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run, and no deadline: neighbours on a busy machine are not the test's fault.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("headrace")
