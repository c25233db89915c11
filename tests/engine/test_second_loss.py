"""A second loss of a server: survived as soon as its next backup is ready, and the end of the run before."""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path

import pytest

import headrace as hr
from engine.counting import Counter, counting_job
from engine.test_elastic import check_counts
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost
from headrace.spec.events import BackupReady, Event, Lost, ServerStarted

pytestmark = pytest.mark.slow

WORKERS = 2
SERVERS = {WORKERS, WORKERS + 1}
EPOCHS = 25


class Killer:
    """Kills a server as soon as its backup is ready, `kills` times; then there is the file `done`.

    `both` kills that backup with it.
    """

    def __init__(self, kills: int, done: Path, both: bool = False) -> None:
        self.lost: list[int] = []
        self._kills, self._done, self._both = kills, done, both
        self._pids: dict[int, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, ServerStarted):
            self._pids[event.rank] = event.pid
        elif isinstance(event, Lost):
            self.lost.append(event.lost)
        elif isinstance(event, BackupReady):
            self._kills -= 1
            if self._kills < 0:
                self._done.touch()
                return
            for rank in SERVERS if self._both else SERVERS - {event.backup}:
                os.kill(self._pids[rank], signal.SIGKILL)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_server_that_is_lost_when_its_next_backup_is_ready_is_followed_by_it(
    engine: LocalEngine, tmp_path: Path, transport: str
) -> None:
    done = tmp_path / "done"
    killer = Killer(3, done)
    strategy = hr.ParameterServer(WORKERS, backups=1, transport=transport)
    job = counting_job(EPOCHS, model=functools.partial(Counter, done))
    check_counts(hr.fit(job, strategy, engine=engine, on_event=killer), EPOCHS)
    assert killer.lost == [2, 3, 2]


def test_a_server_that_is_lost_before_ends_the_run_and_the_error_says_for_how_long_it_had_no_backup(
    engine: LocalEngine, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    killer = Killer(1, done, both=True)
    job = counting_job(EPOCHS, model=functools.partial(Counter, done))
    with pytest.raises(PeerLost) as caught:
        hr.fit(job, hr.ParameterServer(WORKERS, backups=1), engine=engine, on_event=killer, run_dir=tmp_path / "run")
    assert caught.value.exit_code == 4
    said = r"no backup holds yet all that it held, \d+\.\d s after the last one was lost; resume=True goes on from a "
    assert re.search(said + "checkpoint, and with more servers each holds less", str(caught.value))
