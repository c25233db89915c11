"""`headrace launch-files`: what SLURM, Kubernetes or torchrun starts a job from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.combinations import refuse_idle
from headrace.cli.commands.launch import has_backups
from headrace.cli.jobfile import check_file
from headrace.cli.launch_files.kubernetes import Form, PodSettings, manifests
from headrace.cli.launch_files.request import LaunchRequest, scheduler_name
from headrace.cli.launch_files.slurm import sbatch_script
from headrace.cli.launch_files.torchrun import torchrun_script
from headrace.cli.launch_files.yaml import yaml_of
from headrace.cli.options import JsonOption, help_option, job_name
from headrace.cli.output import answering
from headrace.errors import UnfitMachine, UnknownName, UsageError

_EXAMPLES = """
  headrace launch-files slurm job.py --workers 8 --hosts 2
  headrace launch-files slurm job.py --workers 8 -- --strategy "pipeline(4)"
  headrace launch-files kubernetes job.py --workers 4 --image job --claim runs
  headrace launch-files torchrun job.py --workers 4 --hosts 2
"""
_NEXT = {"slurm": "sbatch", "kubernetes": "kubectl apply -f", "torchrun": "sh"}
_ENDINGS = {"slurm": "slurm.sh", "kubernetes": "kubernetes.yaml", "torchrun": "torchrun.sh"}
_SAVE_S, _TIME = 90, "24:00:00"
_OWN = ("--run-dir", "--resume", "--resume-if-saved", "--resume-from", "--workers")
"""Options of `train` that the file has already."""


def _option(name: str, help: str, **settings: Any) -> Any:
    return typer.Option(name, help=help, **{"show_default": False, **settings})


_Scheduler = Annotated[
    str, typer.Argument(metavar="SCHEDULER", show_default=False, help="slurm, kubernetes or torchrun.")
]
_Job = Annotated[
    Path, typer.Argument(metavar="JOB.py", show_default=False, help="A job file, as the processes find it.")
]
_Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- OPTIONS", show_default=False, help="Further options of `headrace train`."),
]
_Workers = Annotated[
    int, _option("--workers", "How many processes, also those that are servers.", min=1, show_default=True)
]
_Hosts = Annotated[int | None, _option("--hosts", "On how many. Default: 1; Kubernetes decides itself.", min=1)]
_RunDir = Annotated[str, _option("--run-dir", "Seen by all hosts. Default: a folder in runs.", metavar="DIR")]
_Cores = Annotated[int, _option("--cores", "Of each process.", min=1, show_default=True)]
_Memory = Annotated[float | None, _option("--memory-gb", "Of each process.", min=0.1, max=1_000_000)]
_Save = Annotated[int, _option("--save-s", "Seconds that a round and a checkpoint may take.", min=1, show_default=True)]
_Limit = Annotated[str, _option("--time", "SLURM: the limit of each attempt.", show_default=True)]
_Form = Annotated[Form, _option("--form", "Kubernetes: what the cluster starts.", show_default=True)]
_Image = Annotated[str, _option("--image", "Kubernetes: an image with headrace and the job file.")]
_Claim = Annotated[str, _option("--claim", "Kubernetes: a PersistentVolumeClaim that all pods can write.")]
_Output = Annotated[Path | None, _option("--output", "Where it is written.", metavar="FILE")]
_Force = Annotated[bool, _option("--force", "Replace the file if it exists.")]


def launch_files(
    scheduler: _Scheduler,
    job: _Job,
    arguments: _Arguments = None,
    workers: _Workers = 2,
    hosts: _Hosts = None,
    run_dir: _RunDir = "",
    cores: _Cores = 1,
    memory_gb: _Memory = None,
    save_s: _Save = _SAVE_S,
    time_limit: _Limit = _TIME,
    form: _Form = Form.JOB,
    image: _Image = "",
    claim: _Claim = "",
    output: _Output = None,
    force: _Force = False,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Write what SLURM, Kubernetes or torchrun starts a job from.

    The job saves and ends when the scheduler asks it to, and the next attempt goes on from there.
    """
    with answering(as_json) as answer:
        if scheduler not in _ENDINGS:
            raise UnknownName("scheduler", scheduler, _ENDINGS)
        check_file(job, "job file")
        given = tuple(arguments or ())
        _check(given, workers, hosts)
        refuse_idle(
            {
                "--cores": scheduler == "torchrun" and cores != 1,
                "--memory-gb": scheduler == "torchrun" and memory_gb is not None,
                "--save-s": scheduler == "torchrun" and save_s != _SAVE_S,
                "--time": scheduler != "slurm" and time_limit != _TIME,
                "--form": scheduler != "kubernetes" and form != Form.JOB,
                "--image": scheduler != "kubernetes" and image != "",
                "--claim": scheduler != "kubernetes" and claim != "",
            },
            f"a file for {scheduler} has no place for it; leave it out",
        )
        name = scheduler_name(job_name(job))
        path = output or Path(f"{name}.{_ENDINGS[scheduler]}")
        strategy = () if _has(given, "--strategy") else ("--strategy", "mirrored")
        train = (*strategy, *given)
        cyclic = has_backups(given)
        wanted = LaunchRequest(
            job, name, workers, hosts, train, run_dir, cores, memory_gb, save_s, cyclic=cyclic, file=path
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
    for option in _OWN:
        if _has(arguments, option):
            raise UsageError(f"the file gives `headrace train` its {option}; name it before the --, or leave it out")
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
    try:
        with open(os.open(path, flags, 0o600 if secret else 0o644), "w", encoding="utf-8") as file:
            if secret:
                # One that existed keeps its mode.
                os.fchmod(file.fileno(), 0o600)
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; name another by --output, or replace it by --force") from None
    except OSError as error:
        raise UnfitMachine(f"{path} cannot be written: {error.strerror}; name another by --output") from error
