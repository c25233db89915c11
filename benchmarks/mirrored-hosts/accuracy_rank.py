"""One of the ranks: accuracy_rank.py CODEC SEED FOLDER trains 3 epochs of Fashion-MNIST, and says how good it is."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import torch

import headrace as hr

EPOCHS = 3
JOB = Path(__file__).parents[2] / "examples" / "fashion_mnist" / "job.py"


def main() -> None:
    codec, seed, folder = sys.argv[1:]
    torch.set_num_threads(1)
    job: hr.Job = replace(runpy.run_path(str(JOB))["job"](epochs=EPOCHS), seed=int(seed))
    run = hr.fit(job, hr.Mirrored(codec=codec), run_dir=f"{folder}/run", checkpoints=False, timeout_s=60)
    said = {"accuracy": 100 * run.metrics["accuracy"], "loss": run.metrics["loss"]}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


main()
