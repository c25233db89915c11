"""Runs the command line as one of a launcher's processes; ALSO in the environment is more of it."""

from __future__ import annotations

import os
import sys

from headrace.cli import run

sys.exit(run([*sys.argv[1:], *os.environ.get("ALSO", "").split()]))
