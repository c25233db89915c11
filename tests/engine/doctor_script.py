"""Runs `headrace doctor` on one of several hosts, of which host-1 has another torch."""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import patch

from engine.networks import go_there
from headrace.cli import run
from headrace.engine.network import probe

TORCH = "1.0" if os.environ["HEADRACE_HOST"] == "host-1" else "2.0"


class OneLine:
    """Puts the document that is printed on one line."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def main() -> None:
    go_there()
    if os.environ["WORLD_SIZE"] == "3":
        patch.multiple(probe, _COUNT_S=0.15, _WARM_UP_S=0.05).start()
    patch("headrace.machine.identity.versions", lambda: {"torch": TORCH}).start()
    out = OneLine()
    with patch.object(sys, "stdout", out):
        code = run(["doctor", "--json"])
    if out.text:
        print(json.dumps(json.loads(out.text)))  # noqa: T201
    sys.exit(code)


main()
