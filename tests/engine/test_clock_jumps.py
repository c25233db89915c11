"""The wall clock of every process jumps by up to an hour, each time that it is read: nothing goes by it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from wall_clock import COMPILER, make
from warm.programs import PYTHON

JUMPS = r"""
static __thread unsigned long state;

static long moved_s(void) {
    if (!state) state = 88172645463325252UL ^ (unsigned long)&state ^ (unsigned long)getpid();
    state ^= state << 13; state ^= state >> 7; state ^= state << 17;
    return (long)(state % 7201) - 3600;
}
"""

RUN = r"""
import functools, json, os, signal, sys, time
import torch
import headrace as hr
from headrace.errors import PeerLost

TIMEOUT_S = 2.0
strategies = {
    "mirrored": hr.Mirrored(2),
    "elastic": hr.Mirrored(3, min_workers=2),
    "servers": hr.ParameterServer(2, backups=1),
    "tcp": hr.ParameterServer(2, transport="tcp"),
    "averaging": hr.LocalSGD(2, period=4),
}

class Model(torch.nn.Linear):
    # What a process sees of its clock, now and then.
    def forward(self, x):
        seen = [time.time() for _ in range(20)]
        assert max(seen) - min(seen) > 600
        time.sleep(0.01)  # what takes time here is to be as long as the timeout, not to train
        return super().forward(x)

data = torch.randn(64, 4), torch.randn(64, 1)
job = hr.Job(lambda: Model(4, 1), loss=torch.nn.functional.mse_loss,
             optimizer=functools.partial(torch.optim.SGD, lr=1e-4), data=data, eval_data=data, global_batch_size=12,
             epochs=10**6)

def train(name, seconds):
    stops = seconds == 0
    pids, begun, told = {}, [0.0], {"lost": 0}

    def look(event):
        if event.kind == "worker_started":
            pids[event.rank] = event.pid
        told["lost"] += event.kind == "lost"
        if stops and event.kind == "stepped" and event.step > 50 and not begun[0]:
            begun[0] = time.monotonic()
            os.kill(pids[1], signal.SIGSTOP)

    try:
        run = hr.fit(job, strategies[name], seconds=None if stops else seconds, on_event=look, timeout_s=TIMEOUT_S,
                     checkpoints=hr.Checkpoints(every_s=0.3), check=False)
        return told | {"status": run.status}
    except PeerLost as error:
        return told | {"status": "lost", "rank": error.rank, "after_s": time.monotonic() - begun[0]}

for line in sys.stdin:
    name, seconds = line.split()
    print(json.dumps(train(name, float(seconds))), flush=True)
"""


Told = Callable[[str, float], dict[str, object]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Trains for seconds, or until a worker is frozen, in a process whose clock jumps: one for all of these runs."""
    if COMPILER is None:
        pytest.skip("there is no C compiler to make a clock that jumps")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "run.py").write_text(RUN)
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [PYTHON, str(folder / "run.py")],
            env={**os.environ, "LD_PRELOAD": make(folder, JUMPS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )

    def train(strategy: str, seconds: float) -> dict[str, object]:
        assert process.stdin is not None
        assert process.stdout is not None
        print(strategy, seconds, file=process.stdin, flush=True)
        line = process.stdout.readline()
        while line and not line.startswith("{"):
            line = process.stdout.readline()
        assert line, (folder / "said").read_text()[-3000:]
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    yield train
    process.communicate(timeout=120)
    assert process.returncode == 0, (folder / "said").read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["elastic", "tcp", *(pytest.param(each, marks=pytest.mark.full) for each in ("mirrored", "servers", "averaging"))],
)
def test_no_process_is_taken_for_lost(told: Told, name: str) -> None:
    found = told(name, 3)
    assert (found["status"], found["lost"]) == ("ok", 0)


@pytest.mark.slow
def test_a_frozen_process_is_noticed_in_time(told: Told) -> None:
    found = told("mirrored", 0)
    assert (found["status"], found["rank"]) == ("lost", 1)
    assert 1.5 < float(str(found["after_s"])) < 4.5
