"""Accelerator, for scripts that are written for Accelerate: their import changes, and their numbers do not.

    from headrace.accelerate import Accelerator

`headrace launch script.py --workers 2` starts it, as `accelerate launch --num_processes 2 script.py` does.
"""

from headrace.accelerate.accelerator import Accelerator
from headrace.accelerate.logs import get_logger

__all__ = ["Accelerator", "get_logger"]
