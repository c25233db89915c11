"""`headrace doctor`: what this machine has and lacks, each fact with a verdict and a remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.combinations import refuse_idle, refuse_settings
from headrace.cli.command import argument, command
from headrace.cli.commands.launch import COMMAND_LINE, hosts_of, over_ssh
from headrace.cli.engines import launched_rank, launched_world
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.listening import Listener, listeners
from headrace.cli.options import ClusterOption, SettingsOption, SshOption
from headrace.cli.output import Answer, ExitCode
from headrace.cli.survey import ACCELERATORS, SPEED, checks_of, listed, measured, own_facts
from headrace.cli.verdict import Check, Verdict, ok, problem, table, warning, warning_if, worst
from headrace.devices import (
    HOST,
    DeviceKind,
    accelerators,
    device_names,
    explain_auto,
    hidden,
    package_problem,
    parts_of_devices,
)
from headrace.errors import HeadraceError, UsageError
from headrace.machine import disk
from headrace.machine.accelerators import backend_version
from headrace.machine.extras import extras, half_installed, installed, lacks, remedy, requirements
from headrace.machine.resources import core_quota, cores, memory_limit_bytes, most_threads, spare_memory_bytes
from headrace.machine.versions import TESTED_PYTHON, TESTED_TORCH, TORCH_REMEDY, minor_of, too_old, untested
from headrace.report.format import byte_count
from headrace.spec.cluster import Cluster
from headrace.spec.plain import to_plain

_EXAMPLES = """
  headrace doctor
  headrace doctor job.py
  headrace doctor --json | jq '.checks[] | select(.verdict != "ok")'
"""

_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED_MEMORY = 256 << 20
_LITTLE_DISK = 1 << 30


def examine() -> list[Check]:
    """Returns every check's lines, in the order of `CHECKS`."""
    return [line for check in CHECKS for line in check()]


def _python() -> Iterator[Check]:
    try:
        yield ok("headrace", importlib.metadata.version("headrace"))
    except importlib.metadata.PackageNotFoundError:
        yield warning("headrace", "runs from its source, not installed", "pip install -e .")
    tested = f"{platform.python_version()}; the tests ran with {', '.join(TESTED_PYTHON)}"
    yield warning_if(
        minor_of(platform.python_version()) > minor_of(TESTED_PYTHON[-1]),
        "python",
        tested,
        f"Python {TESTED_PYTHON[-1]}, if something fails",
    )


def _torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield problem("torch", "not installed", TORCH_REMEDY)
        return
    for kind in accelerators():
        # Before torch is imported, which loads the package, and ends where the two do not fit.
        if kind.package and importlib.util.find_spec(kind.package) and (said := package_problem(kind)):
            what, _, remedy = said.partition(": ")
            yield problem(kind.package, what, f"{remedy}, or pip uninstall {kind.package}")
            return
    try:
        # Here alone: it takes a second, and `--help` has none.
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        yield problem("torch", f"installed, but does not load: {error}", TORCH_REMEDY)
        return
    if too_old(torch.__version__):
        yield problem("torch", f"{torch.__version__}, too old", TORCH_REMEDY)
        return
    tested = f"{torch.__version__}; the tests ran with {', '.join(TESTED_TORCH)}"
    yield warning_if(
        bool(untested(torch.__version__)), "torch", tested, f"pip install torch=={TESTED_TORCH[-1]}, if something fails"
    )
    yield from _accelerators()


def _processor() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError, RuntimeError):
        return  # the line of torch says why
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "DEFAULT" and platform.machine() == "x86_64":
        yield warning(
            "processor",
            "torch uses no vector instructions (AVX2)",
            "one with AVX2 is several times faster",
        )
    else:
        yield ok("processor", f"torch uses {capability}")


def _accelerators() -> Iterator[Check]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = {kind.name: device_names(kind) for kind in accelerators()}
    for kind in accelerators():
        if names[kind.name]:
            yield from _usable(kind, names[kind.name])
        elif said := hidden(kind):
            yield warning(ACCELERATORS, said, f"unset {kind.visible} to use them")
    if any(names.values()):
        return
    if caught:
        yield warning(ACCELERATORS, f"not usable: {caught[0].message}", "update the driver")
        return
    for kind in accelerators():
        if kind.driver and disk.exists(Path(kind.driver)) and not hidden(kind):
            yield warning(ACCELERATORS, f"a driver ({kind.driver}), but torch finds no {kind.title}", kind.remedy)
            return
    yield ok(ACCELERATORS, f"none; {explain_auto(HOST)}")


def _usable(kind: DeviceKind, names: Sequence[str]) -> Iterator[Check]:
    """Says what the devices of a kind are, and by what they exchange."""
    devices = [f"{kind.name}:{index}" for index in range(len(names))]
    title = listed(devices) if not parts_of_devices(kind) else f"{len(names)} x a part of {names[0]}"
    yield warning_if(len(set(names)) > 1, ACCELERATORS, title, SPEED)
    version = backend_version(kind)
    if kind.backend and not version:
        missing = f"torch is built without {kind.backend}, by which workers on several of them exchange"
        yield warning("collectives", missing, kind.remedy)
    elif kind.backend:
        yield ok("collectives", f"{kind.backend} {version}")


def _packages() -> Iterator[Check]:
    needed = [one for one in requirements() if one.name != "torch"]
    if lacking := lacks(needed):
        install = " ".join(f"'{lack.requirement}'" for lack in lacking)
        yield problem("packages", ", ".join(map(str, lacking)), f"pip install {install}")
    elif needed:
        yield ok("packages", ", ".join(f"{one.name} {installed(one.name)}" for one in needed))


def _extras() -> Iterator[Check]:
    half = half_installed()
    complete = [extra for extra in extras() if not lacks(requirements(extra))]
    absent = [extra for extra in extras() if extra not in half and extra not in complete]
    for verb, names in (("complete", complete), ("not installed", absent)):
        if names:
            yield ok("extras", f"{verb}: {', '.join(names)}")
    for extra, lacking in half.items():
        yield warning(f"extra {extra}", f"half installed: {', '.join(map(str, lacking))}", remedy(extra))


def _cores() -> Iterator[Check]:
    allowed, quota = cores(), core_quota()
    text = f"{allowed} usable of {os.cpu_count()}"
    if quota is not None and quota < allowed:
        text += f", limited to the time of {quota:.3g} by a control group"
    if most := most_threads():
        text += f", OMP_NUM_THREADS={most} for each process"
    remedy = "workers share one core: use strategy one_device, or give more cores"
    yield warning_if(min(allowed, quota or allowed) < 2, "cores", text, remedy)


def _memory() -> Iterator[Check]:
    spare = spare_memory_bytes()
    text = f"{byte_count(spare)} free of {byte_count(memory_limit_bytes())}"
    yield warning_if(
        spare < _LITTLE_MEMORY, "memory", text, f"a worker takes about 0.5 GB; have {byte_count(_LITTLE_MEMORY)} free"
    )


def _shared_memory() -> Iterator[Check]:
    try:
        # Lazily: it imports torch.
        from headrace.shared_memory.control_page import check_shared_memory

        reason = check_shared_memory()
    except ImportError as error:
        yield problem("shared memory", f"not checked: {error}", TORCH_REMEDY)
        return
    if reason is not None:
        remedy = "run on Linux 5.4 or newer, outside a sandbox that forbids memfd_create and futex"
        yield problem("shared memory", reason, remedy)
    else:
        yield ok("shared memory", "memfd and futex work")
    folder = Path("/dev/shm")
    if not disk.is_folder(folder):
        yield warning("/dev/shm", "not there", "mount -t tmpfs tmpfs /dev/shm")
        return
    usage = shutil.disk_usage(folder)
    text = f"{byte_count(usage.free)} free of {byte_count(usage.total)}"
    yield warning_if(
        usage.free < _LITTLE_SHARED_MEMORY, "/dev/shm", text, "docker run --shm-size=2g, or delete what fills it"
    )


def _system() -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() == "Linux":
        yield ok("kernel", system)
    else:
        yield problem("kernel", system, "use Linux: workers share memory by its system calls")
    usage = shutil.disk_usage(Path.cwd())
    space = f"{byte_count(usage.free)} free of {byte_count(usage.total)} in {Path.cwd()}"
    if not os.access(Path.cwd(), os.W_OK):
        yield warning("disk", f"{Path.cwd()} is not writable", "name another place with --run-dir")
    else:
        yield warning_if(usage.free < _LITTLE_DISK, "disk", space, "free some, or name another place with --run-dir")


def _listening() -> Iterator[Check]:
    yield ok(
        "listens by default",
        "no network address; servers: a Unix socket, this user's alone; over TCP: loopback, encrypted",
    )
    for listener in listeners():
        yield _listener(listener)


def _listener(listener: Listener) -> Check:
    who = f"process {listener.pid}" if listener.pid else "another user's process"
    if listener.address.startswith("local:"):
        return ok("listens", f"{who}: {listener.address}, this machine and its user alone")
    reach = f"{who}: {listener.address}, {'loopback' if listener.loopback else 'reached from other machines'}, "
    if listener.encrypted:
        return ok("listens", f"{reach}encrypted, with the run's secret")
    if listener.loopback:
        remedy = "not headrace's servers: torch's rendezvous or a script; any user of this machine can speak to it"
        return warning("listens", f"{reach}not encrypted", remedy)
    remedy = (
        "every host that reaches it can connect to it: set MASTER_ADDR to 127.0.0.1, or keep others off by a firewall"
    )
    return problem("listens", f"{reach}not encrypted", remedy)


CHECKS: tuple[Callable[[], Iterable[Check]], ...] = (
    _python,
    _torch,
    _processor,
    _packages,
    _extras,
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
        from headrace.api.probes.probing import probe, probe_metrics
        from headrace.worker.session import objectives_of

        info = inspect_job(job)
        objectives = objectives_of(info.job, info.module, info.weighed)
        findings = (*probe_metrics(info.job, info.module), *probe(info.job, info.module, *objectives))
    except HeadraceError as error:
        yield problem("job", str(error), f"correct {path}; nothing would have been trained")
        return
    parameters = sum(parameter.elements for parameter in info.model.trainable)
    yield ok("job", f"{path}: {parameters:,} trained parameters, {info.examples:,} examples")
    for notice in info.notices:
        yield ok("job", notice)
    for finding in findings:
        what = f"{finding.where}: {finding.what} (matters for {finding.scope.value})"
        yield warning("job", what, finding.remedy)


@command(_EXAMPLES, "looking at this machine")
def doctor(
    answer: Answer,
    path: Annotated[
        Path | None, argument("JOB.py", "A job file to look at, too: what would differ between one device and several.")
    ] = None,
    settings: SettingsOption = None,
    cluster: ClusterOption = None,
    ssh: SshOption = "ssh",
) -> None:
    """Say what this machine has and what it lacks.

    Versions, cores, memory, shared memory, accelerators, disk: each line is ok, a warning or a problem,
    with a remedy; a problem makes the exit code 3. With a job file: what its runs would say before the start.
    Under a launcher on several hosts: what differs between them, and what the links carry, which goes to a file.
    With --cluster and without a launcher it starts one process on each host of the file, by ssh.
    """
    refuse_settings(path, settings)
    if cluster is None or launched_rank() is not None:
        refuse_idle(answer.given("--ssh"), "for the hosts of --cluster, without a launcher; leave it out")
    if cluster and launched_rank() is None:
        raise typer.Exit(_over_ssh(path, settings or (), cluster, ssh, answer.as_json))
    if cluster or launched_world() > 1:
        checks = _survey(path, settings or (), cluster, answer)
    else:
        checks = examine() + (list(_job(path, settings or ())) if path else [])
        _show(answer, checks)
    verdict = worst(checks)
    if verdict is Verdict.PROBLEM:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _survey(path: Path | None, settings: Sequence[str], file: Path | None, answer: Answer) -> list[Check]:
    """Measures together with the launcher's other processes; rank 0 shows and writes what was found."""
    said = Cluster.load(file) if file else None
    # Lazily: it imports torch.
    from headrace.engine.network.survey import survey

    surveyed = survey(own_facts(path, settings))
    checks = checks_of(surveyed, said)
    if launched_rank() == 0:
        target = file.with_suffix(".measured.toml") if file else Path("cluster.measured.toml")
        target.write_text(measured(surveyed, said).toml(), encoding="utf-8")
        _show(answer, checks, target)
    elif worst(checks) is Verdict.PROBLEM:
        typer.echo(f"see what is wrong on {surveyed.hosts[0].host.name}, where rank 0 is", err=True)
    return checks


def _over_ssh(path: Path | None, settings: Sequence[str], cluster: Path, ssh: str, as_json: bool) -> int:
    if as_json:
        raise UsageError("--json needs a launcher where several hosts are measured; read the file that is written")
    arguments = ["doctor", *([str(path)] if path else []), "--cluster", str(cluster)]
    arguments += [part for setting in settings for part in ("--set", setting)]
    hosts = hosts_of(cluster)
    return over_ssh(hosts, (*COMMAND_LINE, *arguments), path or cluster, len(hosts), ssh=ssh)


def _show(answer: Answer, checks: Sequence[Check], file: Path | None = None) -> None:
    if answer.as_json:
        written = {"cluster": str(file)} if file else {}
        document = {"verdict": worst(checks).value, "checks": [to_plain(check) for check in checks], **written}
        answer.document(document)
        return
    answer.show(table(checks))
    if file:
        answer.text(f"cluster: {file}")
