"""Trains with servers over one way, goes on from what was saved, and trains what runs bytes: see `main`."""

import collections
import json
import os
import pickle
import sys
from pathlib import Path

import headrace as hr
from engine.lasting import OFTEN, lasting_job
from engine.victims import faulty, make_job
from headrace.engine.local.engine import LocalEngine


def plant() -> None:
    """What must never be done with received bytes."""
    pickle.loads(pickle.dumps(collections.OrderedDict()))
    exec("pass")


def main(way: str, folder: Path, log: Path) -> None:
    """Prints how long each file of `log` is when the runs that do nothing strange have ended."""
    with LocalEngine() as engine:
        for epochs, resume in ((1, False), (2, True)):
            job = lasting_job("plain", {"clip_norm": None}, epochs=epochs)
            strategy = hr.ParameterServer(2, 2, transport=way)
            hr.fit(job, strategy, engine=engine, run_dir=folder / "sound", checkpoints=OFTEN, resume=resume)
        print(json.dumps({file.name: file.stat().st_size for file in log.iterdir()}))  # noqa: T201
        planted = make_job(model=faulty(plant, victim=None, when=1))
        hr.fit(planted, hr.ParameterServer(2), engine=engine, run_dir=folder / "planted")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(os.environ["HEADRACE_AUDIT"]))
