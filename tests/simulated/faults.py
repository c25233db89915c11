"""What goes wrong with calls on simulated devices, as a test says, or because a call is not done in its time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from simulated.calls import Call
from simulated.wires import Closed

FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("SIMULATED_FAULTS", "[]"))
"""What goes wrong: {"rank": 1, "call": "all_reduce", "at": 5, "do": "never"}, of a rank's calls of that name the sixth.

"rank" is that in the run, and may be left out as "call" may; "do" is "delay", for "seconds", "fail", or "never".
"""

_made: dict[str, int] = {}


def suffer(call: Call, rank: int, stopped: threading.Event, hang: Callable[[float], None]) -> None:
    """Does what a fault says; `hang` takes until when."""
    for fault in FAULTS:
        if fault.get("rank", rank) != rank or fault.get("call", call.name) != call.name:
            continue
        key = json.dumps(fault, sort_keys=True)
        place = _made[key] = _made.get(key, -1) + 1
        if place != fault.get("at", place):
            continue
        if fault["do"] == "delay":
            stopped.wait(fault["seconds"])
        elif fault["do"] == "fail":
            raise Closed(f"NCCL error: unhandled system error, in {call.said()} on rank {rank}")
        elif fault["do"] == "never":
            hang(call.began + call.timeout_s)


def timed_out(members: Sequence[int], rank: int, call: Call) -> str:
    """What torch's watchdog does: by default it ends the process."""
    said = (
        f"[rank{members[rank]}]: Watchdog caught collective operation timeout: {call.said()} among ranks "
        f"{members} ran for {time.monotonic() - call.began:.1f} s before timing out"
    )
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in "13":
        sys.stderr.write(said + "\n")
        sys.stderr.flush()
        os.abort()
    return said
