"""Real torchrun on two hosts: its agents' store is in the way of ours, and the run is that of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from engine.networks import MASTER, RUN_SECRET, network
from engine.ranks import TESTS, free_port, total
from engine.ssh.servers import there
from engine.victims import make_job

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.full, pytest.mark.usefixtures("real_python")]

SCRIPT = """
import json, os
import headrace as hr
from engine.ranks import total
from engine.victims import make_job

run = hr.fit(make_job(epochs=2), "mirrored")
hosts = [role.host for role in run.plan.roles]
print(json.dumps({"rank": os.environ["RANK"], "hosts": hosts, "total": total(run.model)}), flush=True)
"""


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_agents_on_two_hosts(tmp_path: Path, rendezvous: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    port = str(free_port())
    meeting = {
        "static": ["--master-addr", MASTER, "--master-port", port],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{MASTER}:{port}", "--rdzv-id", "test"],
    }[rendezvous]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting]
    with network(2, kind="r") as hosts:
        agents = []
        for host in range(2):
            environment = {
                **os.environ,
                "HEADRACE_SECRET": RUN_SECRET,
                "HEADRACE_HOST": f"host-{host}",
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            }
            # torchrun does not find out by itself that a namespace is the host of its store.
            found = ["--local-addr", f"10.97.0.{host + 1}", "--rdzv-conf", f"is_host={host == 0}"]
            own = ["--node-rank", str(host)] if rendezvous == "static" else found
            agents.append(
                subprocess.Popen(
                    there(hosts, host, [*command, *own, str(tmp_path / "script.py")]),
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        ended = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    said = [json.loads(line) for output, _ in ended for line in output.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in said) == ["0", "1", "2", "3"]
    expected = total(hr.fit(make_job(epochs=2), engine=hr.ThreadEngine()).model)
    assert [each["total"] for each in said] == pytest.approx([expected] * 4, abs=1e-6)
    assert {tuple(sorted(set(each["hosts"]))) for each in said} == {("host-0", "host-1")}
