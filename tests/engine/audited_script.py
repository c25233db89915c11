"""Trains with servers over one way, then goes on from what was saved: audited_script.py <way> <run directory>."""

import collections
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


if __name__ == "__main__":
    way, folder = sys.argv[1], Path(sys.argv[2])
    if way == "planted":
        hr.fit(make_job(model=faulty(plant, victim=None, when=1)), hr.ParameterServer(2), run_dir=folder)
    else:
        with LocalEngine() as engine:
            for epochs, resume in ((1, False), (2, True)):
                job = lasting_job("plain", {"clip_norm": None}, epochs=epochs)
                strategy = hr.ParameterServer(2, 2, transport=way)
                hr.fit(job, strategy, engine=engine, run_dir=folder, checkpoints=OFTEN, resume=resume)
