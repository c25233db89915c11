"""Where the store of a run is that goes on without its rank 0: a file in the run's directory says it.

    runs/a/leader.json   {"store": "tcp://10.0.0.3:41873", "rank": 2, "host": "c", "beat": 417}

The rank that serves the store writes it about once a second, first rank 0. A process that begins looks whether a store
answers there that has the run's secret, and says that the run trains; then it joins. The file itself is no secret.

A file that a killed run has left names the address at which rank 0 of the next one serves its store: without that word,
a rank that begins a little later would wait to be let in, and rank 0 for that rank.
"""

from __future__ import annotations

import json
import os
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic, sleep

from headrace.engine.torchrun.key_value import StoreClient
from headrace.engine.torchrun.secret import given_secret
from headrace.errors import RunFailed, UsageError
from headrace.machine.identity import host_name

STORE = "HEADRACE_STORE"
"""Names, in the environment, the address of the store of a run that goes on."""

TRAINS = "headrace/trains"
"""A number in the store: not 0 once the workers have found each other."""

_FILE = "leader.json"
_ANSWER_S = 2.0
_LOOK_EVERY_S = 0.25
_CHANGES = 2
"""The file as it was found, and a last one of a rank that led; more changes are of one that leads now."""


def tell_leader(run_dir: Path, address: str, rank: int, beat: int = 0) -> None:
    """Writes where the store is, if the disk takes it; `beat` grows as long as the run goes on."""
    part = run_dir / f"{_FILE}.part-{rank}"
    told = {"store": address, "rank": rank, "host": host_name(), "beat": beat}
    # Training goes on where the disk is full or no file can be opened, and the next beat tells it again.
    with suppress(OSError):
        part.write_text(json.dumps(told) + "\n", encoding="utf-8")
        part.rename(run_dir / _FILE)


def forget_leader(run_dir: Path) -> None:
    """Removes the file at the end of a run, if the disk allows it: one that is left leads nowhere."""
    with suppress(OSError):
        (run_dir / _FILE).unlink()


def find_leader(run_dir: Path, within_s: float) -> None:
    """Sets `STORE` in the environment if a run goes on in this directory without its rank 0.

    Where a file is left and no store answers, the others may just be about to make one: then it waits for so long.

    Raises:
        RunFailed: the run goes on, and is not reached from here; so that no second one begins in its directory.
    """
    secret, give_up, said, changes = given_secret(), monotonic() + within_s, "", 0
    while secret is not None and STORE not in os.environ and (text := _text(run_dir)):
        changes, said = changes + (text != said), text
        address = _address(text)
        try:
            with closing(StoreClient(address, secret, _ANSWER_S, 0)) as store:
                if store.add(TRAINS, 0):
                    os.environ[STORE] = address
            return
        except (ConnectionError, TimeoutError) as error:
            if monotonic() > give_up and changes > _CHANGES:
                raise RunFailed(
                    f"a run goes on in {run_dir}, led at {address}, which is not reached from {host_name()}: {error}"
                ) from error
            if monotonic() > give_up:
                return  # it is left from a run that was killed
        sleep(_LOOK_EVERY_S)


def _text(run_dir: Path) -> str:
    try:
        return (run_dir / _FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _address(text: str) -> str:
    try:
        return str(json.loads(text)["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{_FILE} in the run's directory is damaged ({error}): {text[:80]!r}; remove it") from error
