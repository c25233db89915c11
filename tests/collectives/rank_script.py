"""One rank of a test: joins the group, plays its part of a scenario, leaves what it returned in a file.

Arguments: scenario, rank, world, process id and descriptor of the control page, file for the result, arguments as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from channels import mail_scenarios
from collectives import scenarios
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.errors import PeerLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment


def main() -> None:
    scenario, rank, world, pid, descriptor, result, arguments = sys.argv[1:]
    page = ControlPage(SharedSegment.open(int(pid), int(descriptor), ControlPage.nbytes(int(world))), int(world))

    def check() -> None:
        if page.abort:
            raise PeerLost(page.abort - 1, "this host", "the test says so")

    host = SharedMemoryGroup(page, int(rank), check)
    act = getattr(scenarios, scenario, None) or getattr(mail_scenarios, scenario)
    returned = act(host, page, **json.loads(arguments))
    host.close()
    Path(result).write_text(json.dumps(returned))


main()
