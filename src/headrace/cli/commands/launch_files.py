"""`headrace launch-files`: what SLURM, Kubernetes or torchrun starts a job from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headrace.cli.combinations import refuse_idle
from headrace.cli.command import argument, command, option
from headrace.cli.commands.launch import has_backups
from headrace.cli.jobfile import check_file
from headrace.cli.launch_files.kubernetes import Form, PodSettings, manifests, yaml_of
from headrace.cli.launch_files.scripts import LaunchRequest, sbatch_script, scheduler_name, torchrun_script
from headrace.cli.options import job_name
from headrace.cli.output import Answer, writing
from headrace.devices import GPU
from headrace.errors import UnknownName, UsageError

_EXAMPLES = """
  headrace launch-files slurm job.py --workers 8 --hosts 2
  headrace launch-files slurm job.py --workers 8 -- --strategy "pipeline(4)"
  headrace launch-files kubernetes job.py --workers 4 --image job --claim runs
  headrace launch-files torchrun job.py --workers 4 --hosts 2
"""
_NEXT = {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "torchrun": "sh"}
_ENDINGS = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "torchrun": "torchrun.sh"}
_WITHOUT_PLACE = {
    "slurm": ("--form", "--image", "--claim"),
    "kubernetes": ("--time",),
    "torchrun": ("--cores", "--memory-gb", "--gpus", "--save-s", "--time", "--form", "--image", "--claim"),
}
_OWN = ("--run-dir", "--resume", "--resume-if-saved", "--resume-from", "--workers")
"""Options of `train` that the file has already."""


_Hosts = Annotated[int | None, option("--hosts", "On how many. Default: 1; Kubernetes decides itself.", min=1)]


@command(_EXAMPLES)
def launch_files(
    answer: Answer,
    scheduler: Annotated[str, argument("SCHEDULER", "slurm, kubernetes or torchrun.")],
    job: Annotated[Path, argument("JOB.py", "A job file, as the processes find it.")],
    arguments: Annotated[list[str] | None, argument("-- OPTIONS", "Further options of `headrace train`.")] = None,
    workers: Annotated[int, option("--workers", "How many processes, also those that are servers.", min=1)] = 2,
    hosts: _Hosts = None,
    run_dir: Annotated[str, option("--run-dir DIR", "Seen by all hosts. Default: a folder in runs.")] = "",
    cores: Annotated[int, option("--cores", "Of each process.", min=1)] = 1,
    memory_gb: Annotated[float | None, option("--memory-gb", "Of each process.", min=0.1, max=1_000_000)] = None,
    gpus: Annotated[int, option("--gpus", "Of each process: 1, or 0 for CPUs alone.", min=0, max=1)] = 0,
    save_s: Annotated[int, option("--save-s", "Seconds that a round and a checkpoint may take.", min=1)] = 90,
    time_limit: Annotated[str, option("--time", "SLURM: the limit of each attempt.")] = "24:00:00",
    form: Annotated[Form, option("--form", "Kubernetes: what the cluster starts.")] = Form.JOB,
    image: Annotated[str, option("--image", "Kubernetes: an image with headrace and the job file.")] = "",
    claim: Annotated[str, option("--claim", "Kubernetes: a PersistentVolumeClaim that all pods can write.")] = "",
    output: Annotated[Path | None, option("--output FILE", "Where it is written.")] = None,
    force: Annotated[bool, option("--force", "Replace the file if it exists.")] = False,
) -> None:
    """Write what SLURM, Kubernetes or torchrun starts a job from.

    The job saves and ends when the scheduler asks it to, and the next attempt goes on from there.
    """
    if scheduler not in _ENDINGS:
        raise UnknownName("scheduler", scheduler, _ENDINGS)
    check_file(job, "job file")
    given = tuple(arguments or ())
    _check(given, workers, hosts)
    refuse_idle(answer.given(*_WITHOUT_PLACE[scheduler]), f"a file for {scheduler} has no place for it; leave it out")
    name = scheduler_name(job_name(job))
    path = output or Path(f"{name}.{_ENDINGS[scheduler]}")
    strategy = () if _has(given, "--strategy") else ("--strategy", "mirrored")
    # A process that was given none must not quietly train on the CPU.
    device = () if not gpus or _has(given, "--device") else ("--device", GPU)
    train = (*strategy, *given, *device)
    cyclic = has_backups(given)
    wanted = LaunchRequest(
        *(job, name, workers, hosts, train, run_dir, cores, memory_gb, save_s), cyclic=cyclic, file=path, gpus=gpus
    )
    if scheduler == "slurm":
        text = sbatch_script(wanted, time_limit)
    elif scheduler == "torchrun":
        text = torchrun_script(wanted)
    else:
        text = yaml_of(manifests(wanted, _pods(image, claim), form))
    _write(path, text, force, secret=scheduler == "kubernetes")
    command = f"{_NEXT[scheduler]} {path}"
    answer.give({"file": str(path), "command": command}, f"wrote {path}; start it: {command}")


def _check(arguments: Sequence[str], workers: int, hosts: int | None) -> None:
    for name in _OWN:
        if _has(arguments, name):
            raise UsageError(f"the file gives `headrace train` its {name}; name it before the --, or leave it out")
    if hosts is not None and workers < hosts:
        raise UsageError(f"--workers {workers} on {hosts} hosts: every host needs at least one")


def _has(arguments: Sequence[str], option: str) -> bool:
    return any(argument.split("=")[0] == option for argument in arguments)


def _pods(image: str, claim: str) -> PodSettings:
    if not image:
        raise UsageError("Kubernetes starts containers: name an image with headrace and the job file by --image")
    if not claim:
        raise UsageError(
            "all pods write to one run directory: name a PersistentVolumeClaim (ReadWriteMany) for it by --claim"
        )
    return PodSettings(image, claim)


def _write(path: Path, text: str, force: bool, secret: bool) -> None:
    """Writes the file; one with a secret for this user alone."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    with writing("the file", path, "--output"):
        try:
            descriptor = os.open(path, flags, 0o600 if secret else 0o644)
        except FileExistsError:
            raise UsageError(f"{path} exists; name another by --output, or replace it by --force") from None
        with open(descriptor, "w", encoding="utf-8") as file:
            if secret:
                # One that existed keeps its mode.
                os.fchmod(descriptor, 0o600)
            file.write(text)
