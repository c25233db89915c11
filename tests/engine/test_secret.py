"""A run's secret is nowhere but in its processes' memory, however the run ends."""

from __future__ import annotations

import base64
import functools
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from zmq.utils import z85

import headrace as hr
from cover import in_turn
from engine import snoop, victims
from engine.victims import make_job
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError

STRATEGIES = (hr.ParameterServer(2, 2, transport="tcp"), hr.Downpour(2, transport="tcp"))


def nothing() -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class BadLater(torch.optim.SGD):
    """Raises on the server, in a step after the worker has looked."""

    steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps > 12:
            raise ValueError("planted")
        super().step()


DEEDS: dict[str, tuple[Callable[[], object], type[torch.optim.Optimizer]]] = {
    "ends well": (nothing, torch.optim.SGD),
    "a worker raises": (victims.fail, torch.optim.SGD),
    "a worker is killed": (die, torch.optim.SGD),
    "a server raises": (nothing, BadLater),
}


def spellings(secret: bytes) -> list[bytes]:
    """Returns how a secret, and the keys' seed that it is, might be written."""
    padded = [base64.b64encode(secret), base64.urlsafe_b64encode(secret), base64.b32encode(secret), z85.encode(secret)]
    return [secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret).encode()[2:-1], *padded]


def places(folder: Path, said: str, secrets: list[bytes]) -> list[str]:
    """Returns the files below a folder, and among what was said, where a secret stands."""
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents["said"] = said.encode()
    every = [spelt for secret in secrets for spelt in spellings(secret)]
    return [name for name, content in contents.items() if any(spelt in content for spelt in every)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "strategy"),
    in_turn(list(DEEDS), STRATEGIES),
    ids=lambda value: getattr(value, "name", value),
)
def test_no_other_process_can_read_it(
    engine: LocalEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str], ending: str, strategy: hr.Strategy
) -> None:
    deed, optimizer = DEEDS[ending]
    folder, aside = tmp_path / "run", tmp_path / "aside"
    aside.mkdir()
    job = make_job(
        model=functools.partial(snoop.Snooping, aside, deed), optimizer=functools.partial(optimizer, lr=0.1), epochs=4
    )
    said = ""
    try:
        run = hr.fit(job, strategy, engine=engine, run_dir=folder, check=False)
        run.report(str(folder / "report.html"))
        assert "raises" not in ending
    except HeadraceError as error:
        said = "".join(traceback.format_exception(error)) + repr(vars(error))
        assert "raises" in ending
    said += "".join(capfd.readouterr())
    secrets = [bytes.fromhex(line) for line in (aside / snoop.SECRET).read_text().splitlines()]
    assert {len(secret) for secret in secrets} == {32}
    assert len(set(secrets)) == len(secrets) >= 1
    assert (aside / snoop.FOUND).read_text() == ""
    assert snoop.open_to_others(secrets) == []
    assert len(list(folder.rglob("*.jsonl"))) >= 4
    assert places(folder, said, secrets) == []
    # Where it stands, it is found.
    assert places(aside, said, secrets) == [str(aside / snoop.SECRET)]


@pytest.mark.usefixtures("real_python")
def test_it_would_be_found_in_an_environment_and_a_command_line() -> None:
    secret = bytes(range(1, 33))
    script = "import sys; print(flush=True); sys.stdin.read()"
    for arguments, name in (([secret.hex()], "cmdline"), ([], "environ")):
        environment = {**os.environ, "WHATEVER": secret.hex()} if name == "environ" else dict(os.environ)
        command = [sys.executable, "-c", script, *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
            assert process.stdout
            # Before that it may be no process of its own yet.
            process.stdout.readline()
            assert snoop.open_to_others([secret]) == [f"/proc/{process.pid}/{name}"]
            process.communicate()
