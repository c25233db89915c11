"""Shows a scheduler that this process is not frozen: a file that a thread of the process touches."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from pathlib import Path

ALIVE_FILE = "HEADRACE_ALIVE_FILE"
"""Names the file, in the environment."""

TOUCH_EVERY_S = 1.0


@cache
def show_alive() -> None:
    """Touches the file every second, from now until this process ends; a probe of Kubernetes reads its time.

    A process that is stopped, or whose interpreter is held, does not touch it.
    """
    if ALIVE_FILE not in os.environ:
        return
    path, never = Path(os.environ[ALIVE_FILE]), threading.Event()

    def touch() -> None:
        try:
            while True:
                path.touch()
                never.wait(TOUCH_EVERY_S)
        except OSError as error:
            sys.stderr.write(f"headrace: {ALIVE_FILE}={path} cannot be touched ({error}), so a probe finds it old\n")

    threading.Thread(target=touch, name="headrace-alive", daemon=True).start()
