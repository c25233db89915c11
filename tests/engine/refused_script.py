"""Runs the command line as one of a launcher's processes; ALSO in the environment is more of it."""

from __future__ import annotations

import os
import sys

from engine.networks import go_there
from headrace.cli import run

if "NETWORK_NAMESPACE" in os.environ:
    go_there()
sys.exit(run([*sys.argv[1:], *os.environ.get("ALSO", "").split()]))
