"""Real torchrun with its elastic agent: a worker or a host is lost in the middle of a run of elastic workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engine.conftest import until
from engine.networks import MASTER, RUN_SECRET, network
from engine.ranks import TESTS, free_port
from engine.ssh.servers import there

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.full, pytest.mark.usefixtures("real_python")]

SCRIPT = """
import time
import headrace as hr
from engine.counting import counting_job

def train(worker):
    for batch in worker.batches():
        time.sleep(0.1)
        worker.step(batch)

run = hr.launch(train, counting_job(20), hr.Mirrored(min_workers=1), timeout_s=2, run_dir="run", resume="if_saved")
for event in run.events:
    if event.kind == "notice":
        print(event.text, flush=True)
# Last, because the test ends all processes when each of them has said it.
print(f"off by {(run.model.count.detach() - 20).abs().max():g}" if run.status == "ok" else run.status, flush=True)
"""
HOSTS, VICTIM = 3, 2


def of_host(host: int) -> Iterator[tuple[int, bool]]:
    """Yields torchrun's agent on a host and its worker: process, and whether it is the worker."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if f"HEADRACE_HOST=host-{host}".encode() in words and b"script.py" in (folder / "cmdline").read_bytes():
                yield int(folder.name), any(word.startswith(b"LOCAL_RANK=") for word in words)


@pytest.mark.parametrize("lost", ["host", "worker"])
def test_a_run_goes_on_or_begins_again_where_it_was(tmp_path: Path, lost: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    endpoint = f"{MASTER}:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    logs = [tmp_path / f"host-{host}.log" for host in range(HOSTS)]
    with network(HOSTS, kind="w") as hosts:
        agents = []
        for host, log in enumerate(logs):
            environment = {
                **os.environ,
                "HEADRACE_SECRET": RUN_SECRET,
                "HEADRACE_HOST": f"host-{host}",
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            }
            own = ["--local-addr", f"10.97.0.{host + 1}", "--rdzv-conf", f"is_host={host == 0},last_call_timeout=3"]
            started = there(hosts, host, [*command, *own, str(tmp_path / "script.py")])
            with log.open("w") as out:
                agents.append(subprocess.Popen(started, env=environment, cwd=tmp_path, stdout=out, stderr=out))
        try:
            events = tmp_path / "run" / "events" / "rank-0.jsonl"
            assert until(lambda: events.exists() and events.read_text().count('"stepped"') > 20, 120)
            for process, is_worker in list(of_host(VICTIM)):
                if lost == "host" or is_worker:
                    os.kill(process, signal.SIGKILL)
            left = [log for host, log in enumerate(logs) if lost == "worker" or host != VICTIM]
            assert until(lambda: all("off by" in log.read_text() for log in left), 120), [
                log.read_text() for log in logs
            ]
        finally:
            for process, _ in [each for host in range(HOSTS) for each in of_host(host)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for agent in agents:
                agent.wait()
    texts = [log.read_text() for log in left]
    assert ["off by 0\n" in text for text in texts] == [True] * len(texts)
    assert ["goes on from" in text for text in texts] == [lost == "worker"] * len(texts)
