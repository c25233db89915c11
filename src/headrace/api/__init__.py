"""The functions that a user calls, and what they check before a run starts."""

from headrace.machine.versions import require_torch

# Before the modules of this room import names that an older torch lacks.
require_torch()
