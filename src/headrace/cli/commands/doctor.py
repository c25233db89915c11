"""`headrace doctor`: what this machine has and lacks, each fact with a verdict and a remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.jobfile import find_job, load_job
from headrace.cli.listening import Listener, listeners
from headrace.cli.options import JsonOption, SettingsOption, help_option
from headrace.cli.output import ExitCode, answering
from headrace.errors import HeadraceError
from headrace.machine import core_quota, cores, memory_limit_bytes, spare_memory_bytes
from headrace.report.format import byte_count
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLES = """
  headrace doctor
  headrace doctor job.py
  headrace doctor --json | jq '.checks[] | select(.verdict != "ok")'
"""

_LEAST_TORCH = (2, 11)
_LEAST_PYTHON = (3, 11)
_TORCH_REMEDY = "pip install torch==2.13.0"
_NEEDED = ("cloudpickle", "matplotlib", "rich", "safetensors", "typer")
_OPTIONAL = {"sklearn": "the demo's bundled digits", "tensorboard": "--tensorboard"}
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED_MEMORY = 256 << 20
_LITTLE_DISK = 1 << 30


class Verdict(StrEnum):
    """How good a fact is; the worst is last."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """One line of `headrace doctor`; the remedy is empty where it is ok."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}


def examine() -> list[Check]:
    """Returns every check's lines, in the order of `CHECKS`."""
    return [line for check in CHECKS for line in check()]


def worst(checks: Iterable[Check]) -> Verdict:
    """Returns the worst verdict of all."""
    order = list(Verdict)
    return max((check.verdict for check in checks), key=order.index, default=Verdict.OK)


def _ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def _warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, Verdict.WARNING, found, remedy)


def _problem(name: str, found: str, remedy: str) -> Check:
    return Check(name, Verdict.PROBLEM, found, remedy)


def _python() -> Iterator[Check]:
    try:
        yield _ok("headrace", importlib.metadata.version("headrace"))
    except importlib.metadata.PackageNotFoundError:
        yield _warning("headrace", "runs from its source, not installed", "pip install -e .")
    if sys.version_info >= _LEAST_PYTHON:
        yield _ok("python", platform.python_version())
    else:
        yield _problem("python", platform.python_version(), "install Python 3.11 or newer")


def _torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield _problem("torch", "not installed", _TORCH_REMEDY)
        return
    try:
        # Here alone: it takes a second, and `--help` has none.
        import torch
    except (ImportError, OSError) as error:
        yield _problem("torch", f"installed, but does not load: {error}", _TORCH_REMEDY)
        return
    release = str(torch.__version__).partition("+")[0].split(".")
    if tuple(int(part) for part in release[:2]) < _LEAST_TORCH:
        yield _problem("torch", f"{torch.__version__}, too old", _TORCH_REMEDY)
        return
    yield _ok("torch", str(torch.__version__))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        usable = torch.cuda.is_available()
    if usable:
        yield _ok("accelerators", ", ".join(devices))
    elif caught:
        yield _warning("accelerators", f"not usable: {caught[0].message}", "update the driver")
    elif Path("/proc/driver/nvidia/version").exists():
        yield _warning("accelerators", "an NVIDIA driver, but torch finds no GPU", "install a torch build with CUDA")
    else:
        yield _ok("accelerators", "none; the CPU computes")


def _packages() -> Iterator[Check]:
    if importlib.util.find_spec("numpy") is None:
        yield _problem("numpy", "not installed", "pip install numpy")
    else:
        yield _ok("numpy", importlib.metadata.version("numpy"))
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield _problem("packages", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    else:
        yield _ok("packages", ", ".join(_NEEDED))
    for name, use in _OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield _ok(name, f"not installed; only {use} needs it")


def _cores() -> Iterator[Check]:
    allowed, quota = cores(), core_quota()
    found = f"{allowed} usable of {os.cpu_count()}"
    if quota is not None and quota < allowed:
        found += f", limited to the time of {quota:.3g} by a control group"
    if min(allowed, quota or allowed) < 2:
        yield _warning("cores", found, "workers share one core: use strategy one_device, or give more cores")
    else:
        yield _ok("cores", found)


def _memory() -> Iterator[Check]:
    spare = spare_memory_bytes()
    found = f"{byte_count(spare)} free of {byte_count(memory_limit_bytes())}"
    if spare < _LITTLE_MEMORY:
        yield _warning("memory", found, f"a worker takes about 0.5 GB; have {byte_count(_LITTLE_MEMORY)} free")
    else:
        yield _ok("memory", found)


def _shared_memory() -> Iterator[Check]:
    try:
        # Lazily: it imports torch.
        from headrace.shared_memory.control_page import check_shared_memory

        reason = check_shared_memory()
    except ImportError as error:
        yield _problem("shared memory", f"not checked: {error}", _TORCH_REMEDY)
        return
    if reason is not None:
        remedy = "run on Linux 5.4 or newer, outside a sandbox that forbids memfd_create and futex"
        yield _problem("shared memory", reason, remedy)
    else:
        yield _ok("shared memory", "memfd and futex work")
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield _warning("/dev/shm", "not there", "mount -t tmpfs tmpfs /dev/shm")
        return
    usage = shutil.disk_usage(folder)
    found = f"{byte_count(usage.free)} free of {byte_count(usage.total)}"
    if usage.free < _LITTLE_SHARED_MEMORY:
        yield _warning("/dev/shm", found, "docker run --shm-size=2g, or delete what fills it")
    else:
        yield _ok("/dev/shm", found)


def _system() -> Iterator[Check]:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux":
        yield _ok("kernel", found)
    else:
        yield _problem("kernel", found, "use Linux: workers share memory by its system calls")
    usage = shutil.disk_usage(Path.cwd())
    space = f"{byte_count(usage.free)} free of {byte_count(usage.total)} in {Path.cwd()}"
    if not os.access(Path.cwd(), os.W_OK):
        yield _warning("disk", f"{Path.cwd()} is not writable", "name another place with --run-dir")
    elif usage.free < _LITTLE_DISK:
        yield _warning("disk", space, "free some, or name another place with --run-dir")
    else:
        yield _ok("disk", space)


def _listening() -> Iterator[Check]:
    yield _ok(
        "listens by default",
        "no network address; servers: a Unix socket, this user's alone; over TCP: loopback, encrypted",
    )
    for listener in listeners():
        yield _listener(listener)


def _listener(listener: Listener) -> Check:
    who = f"process {listener.pid}" if listener.pid else "another user's process"
    if listener.address.startswith("local:"):
        return _ok("listens", f"{who}: {listener.address}, this machine and its user alone")
    found = f"{who}: {listener.address}, {'loopback' if listener.loopback else 'reached from other machines'}, "
    if listener.encrypted:
        return _ok("listens", f"{found}encrypted, with the run's secret")
    if listener.loopback:
        remedy = "not headrace's servers: torch's rendezvous or a script; any user of this machine can speak to it"
        return _warning("listens", f"{found}not encrypted", remedy)
    remedy = (
        "every host that reaches it can connect to it: set MASTER_ADDR to 127.0.0.1, or keep others off by a firewall"
    )
    return _problem("listens", f"{found}not encrypted", remedy)


CHECKS: tuple[Callable[[], Iterable[Check]], ...] = (
    _python,
    _torch,
    _packages,
    _cores,
    _memory,
    _shared_memory,
    _system,
    _listening,
)
"""What is checked, in the order of the lines."""


def _job(path: Path, settings: Sequence[str]) -> Iterator[Check]:
    """Looks at a job as a run does before its start, and says all that probes find."""
    find_job(path)
    try:
        job = load_job(path, settings)
        # Lazily: they import torch.
        from headrace.api.checks import inspect_job
        from headrace.api.probes.probing import probe
        from headrace.worker.session import objective_of

        info = inspect_job(job)
        findings = probe(info.job, info.module, objective_of(info.job, info.weighed))
    except HeadraceError as error:
        yield _problem("job", str(error), f"correct {path}; nothing would have been trained")
        return
    parameters = sum(parameter.elements for parameter in info.model.trainable)
    yield _ok("job", f"{path}: {parameters:,} trained parameters, {info.examples:,} examples")
    for notice in info.notices:
        yield _ok("job", notice)
    for finding in findings:
        found = f"{finding.where}: {finding.what} (matters for {finding.scope.value})"
        yield _warning("job", found, finding.remedy)


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[JOB.py]",
            show_default=False,
            help="A job file to look at, too: what would differ between one device and several.",
        ),
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Say what this machine has and what it lacks.

    Versions, cores, memory, shared memory, accelerators, disk: each line is ok, a warning or a problem,
    with a remedy; a problem makes the exit code 3. With a job file: what its runs would say before the start.
    """
    with answering(as_json) as answer:
        checks = examine() + (list(_job(path, settings or ())) if path else [])
        verdict = worst(checks)
        if answer.as_json:
            answer.document({"verdict": verdict.value, "checks": [to_plain(check) for check in checks]})
        else:
            answer.show(_table(checks))
    if verdict is Verdict.PROBLEM:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _table(checks: Sequence[Check]) -> Table:
    # Lazily: `--help` need not wait for rich.
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = f"{check.found}\n-> {check.remedy}" if check.remedy else check.found
        table.add_row(Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.name), Text(found))
    return table
