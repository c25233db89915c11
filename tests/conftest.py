"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell lets what it starts in the background ignore Ctrl-C, and the tests of it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no deadline: neighbours on a busy machine are not the test's fault.
settings.register_profile("headrace", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("headrace")
