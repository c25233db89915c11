"""Hosts with names that all of them resolve, and a SLURM of their own on them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.conftest import until
from engine.networks import network

ROOT = Path(__file__).resolve().parents[3]
JOB = """
import functools, torch, headrace as hr

def job(epochs=3, batch=8):
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator))
    return hr.Job(model=functools.partial(torch.nn.Linear, 4, 1), task=hr.tasks.regression(),
                  optimizer=functools.partial(torch.optim.Adam, lr=0.01), data=data,
                  global_batch_size=batch, epochs=epochs, seed=0)
"""
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
_SLURM = """
ClusterName=tests
SlurmctldHost={first}(10.97.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ReturnToService=2
PartitionName=all Nodes={nodes} Default=YES State=UP
"""


def needs(*programs: str) -> None:
    """Skips the test where a program is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")


@dataclass(frozen=True)
class NamedHosts:
    """Hosts of one network; commands run on them with their names."""

    network: str
    names: tuple[str, ...]
    folder: Path

    def on(self, host: int, *command: str) -> list[str]:
        """Returns the command that runs another one on a host."""
        enter = [
            "nsenter",
            f"--net=/run/netns/{self.network}-{host}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            _ENTER,
        ]
        return [*enter, "-", self.names[host].partition(".")[0], str(self.folder / "hosts"), *command]


@contextmanager
def named_hosts(folder: Path, *names: str) -> Iterator[NamedHosts]:
    """Makes hosts, and a folder for what they share."""
    needs("nsenter", "unshare")
    with network(len(names), kind="c") as name:
        addresses = [f"10.97.0.{host + 1} {each}" for host, each in enumerate(names)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        yield NamedHosts(name, names, folder)


@dataclass(frozen=True)
class Slurm:
    """A cluster that has begun."""

    hosts: NamedHosts

    def run(self, *command: str, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node, in the cluster's folder."""
        ended = subprocess.run(
            self.hosts.on(0, *command),
            cwd=self.hosts.folder,
            env={**environment(self.hosts.folder), **variables},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert fails == (ended.returncode != 0), ended.stdout + ended.stderr
        return ended

    def state(self, job: str) -> str:
        """Returns PENDING, RUNNING and so on."""
        told = self.run("scontrol", "show", "job", job).stdout
        return told.partition("JobState=")[2].split()[0]

    def nodes(self) -> list[str] | None:
        """Returns the nodes' states, None while there is no controller."""
        told = subprocess.run(
            self.hosts.on(0, "sinfo", "--noheader", "--Node", "--format=%t"),
            env=environment(self.hosts.folder),
            capture_output=True,
            text=True,
        )
        return told.stdout.split() if told.returncode == 0 else None


def environment(folder: Path) -> dict[str, str]:
    """Returns that of a user of the cluster, who has headrace in the PATH."""
    # Not the tests' warm programs: they would run on this host.
    path = f"{ROOT / '.venv' / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "SLURM_CONF": f"{folder}/slurm.conf"}


@contextmanager
def slurm(folder: Path, *names: str) -> Iterator[Slurm]:
    """Starts SLURM on hosts with these names; skips the test where it is not installed."""
    needs("slurmctld", "slurmd", "srun", "sbatch")
    with named_hosts(folder, *names) as hosts, ExitStack() as started:
        node = "NodeName={0} NodeAddr=10.97.0.{1} Port={2} CPUs=2 RealMemory=1000"
        nodes = [node.format(name, host + 1, 17001 + host) for host, name in enumerate(names)]
        head, tail = _SLURM.format(first=names[0], folder=folder, nodes=",".join(names)).rsplit("PartitionName", 1)
        (folder / "slurm.conf").write_text("\n".join([head.strip(), *nodes, f"PartitionName{tail}"]))
        (folder / "job.py").write_text(JOB)
        for name in ("state", *(f"spool-{each}" for each in names)):
            (folder / name).mkdir()
        cluster = Slurm(hosts)
        controller = _start(hosts.on(0, "slurmctld", "-D", "-c"), folder, "slurmctld")
        started.callback(_end, controller)
        # A node that comes before it tries again after many seconds.
        assert until(lambda: cluster.nodes() is not None, 90), (folder / "slurmctld.log").read_text()
        for host, name in enumerate(names):
            started.callback(_end, _start(hosts.on(host, "slurmd", "-D"), folder, name))
        started.callback(cluster.run, "scancel", "--user=root")
        assert until(lambda: cluster.nodes() == ["idle"] * len(names), 90), (folder / "slurmctld.log").read_text()
        yield cluster


def _start(command: list[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment(folder), stdout=log, stderr=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)
