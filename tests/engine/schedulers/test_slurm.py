"""The same job under a real SLURM of two nodes: srun, the script that is written for sbatch, signals and requeues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.conftest import until
from engine.networks import RUN_SECRET
from engine.schedulers.named_hosts import Slurm, slurm
from headrace.checkpoint import CheckpointFolder
from headrace.report.model.summary import summarize

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.full]

SRUN = ("srun", "--nodes=2", "--ntasks=3", "--overcommit", "headrace", "train", "job.py", "--strategy", "mirrored")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), "n01", "n02") as started:
        yield started


def test_tasks_of_srun_are_the_workers(cluster: Slurm) -> None:
    ended = cluster.run(*SRUN, "--run-dir", "a", HEADRACE_SECRET=RUN_SECRET)
    assert "3 workers on 2 hosts (n01, n02)" in ended.stderr
    assert summarize(cluster.hosts.folder / "a").status == "ok"


def test_without_a_secret_one_task_says_how_to_give_one(cluster: Slurm) -> None:
    errors = cluster.run(*SRUN, "--run-dir", "b", fails=True).stderr.splitlines()
    errors = sorted(line for line in errors if line.startswith("error: "))
    assert len(errors) == 3
    assert all("there is no secret; what it prints says how" in line for line in errors[:2])
    assert "rank 0 on n01" in errors[2]
    assert "run this before srun, which passes it on: export HEADRACE_SECRET=$(python" in errors[2]


def test_more_tasks_than_the_batch_has_examples(cluster: Slurm) -> None:
    ended = cluster.run(*SRUN, "--set", "batch=2", fails=True, HEADRACE_SECRET=RUN_SECRET)
    assert ended.stderr.count("a global batch of 2 cannot be split among 3 workers; use global_batch_size=3") == 1


def test_a_batch_script_without_srun_is_one_process(cluster: Slurm) -> None:
    (cluster.hosts.folder / "alone.sh").write_text("#!/bin/sh\nexec headrace train job.py --run-dir alone\n")
    cluster.run("sbatch", "--wait", "--ntasks=2", "--nodes=2", "alone.sh")
    assert summarize(cluster.hosts.folder / "alone").started.workers == 1


def begun(cluster: Slurm) -> tuple[str, Path, Path]:
    """Starts the written script with a long job; returns the job's number, its directory and its log when it trains."""
    folder = cluster.hosts.folder
    many = ("--", "--set", "epochs=100000", "--checkpoint-every", "0.2s")
    cluster.run("headrace", "launch-files", "slurm", "job.py", "--workers", "2", "--hosts", "2", "--force", *many)
    (script,) = folder.glob("*.slurm.sh")
    job = cluster.run("sbatch", "--parsable", script.name).stdout.strip()
    name = script.name.removesuffix(".slurm.sh")
    run_dir = folder / "runs" / f"{name}-{job}"
    assert until(lambda: any((run_dir / "checkpoints").glob("step-*[0-9]")), 120)
    return job, run_dir, folder / f"{name}-{job}.log"


def test_a_job_that_slurm_asks_to_end_saves_and_goes_on_when_it_is_requeued(cluster: Slurm) -> None:
    job, run_dir, log = begun(cluster)
    # As --signal=TERM@90 does it before the time limit.
    cluster.run("scancel", "--signal=TERM", job)
    assert until(lambda: cluster.state(job) == "PENDING", 120)
    (saved,) = CheckpointFolder(run_dir / "checkpoints").steps()[-1:]
    assert log.read_text().count("error: terminated (SIGTERM)") == 2
    # Else SLURM waits for two minutes. In the second of the first attempt's end it refuses the second one, as revoked.
    assert until(lambda: cluster.nodes() == ["idle", "idle"], 120)
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now+5")
    assert until(lambda: CheckpointFolder(run_dir / "checkpoints").steps()[-1] > saved, 120)
    assert summarize(run_dir).started.resumed_step == saved

    # What the user ends saves, too, and does not come back.
    cluster.run("scancel", job)
    assert until(lambda: cluster.state(job) == "CANCELLED", 120)
    assert until(lambda: log.read_text().count("error: terminated (SIGTERM)") == 4, 120)
    assert f"goes on from {run_dir / 'checkpoints'}/step-{saved:08}" in log.read_text()
    assert cluster.state(job) == "CANCELLED"
