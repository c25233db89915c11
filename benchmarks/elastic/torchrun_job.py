"""One of three workers under torchrun, which starts all of them again when one is lost: torchrun_job.py FOLDER."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from main import WORKERS, cnn_job

import headrace as hr

FOLDER = Path(sys.argv[1])


def train(worker: hr.Worker) -> None:
    with (FOLDER / f"steps-{worker.rank}").open("a") as steps:
        for batch in worker.batches():
            worker.step(batch)
            steps.write(f"{time.monotonic()}\n")
            steps.flush()


if __name__ == "__main__":
    (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    saves = hr.Checkpoints(every_steps=20, every_s=None)
    hr.launch(train, cnn_job(WORKERS), "mirrored", run_dir=FOLDER / "run", checkpoints=saves, resume="if_saved")
