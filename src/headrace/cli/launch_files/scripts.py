"""Scripts that start a job by sbatch or torchrun, and what they are to start."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UsageError

_LONGEST_NAME = 40
"""Of characters: a pod's name, which a number is added to, has at most 63."""


@dataclass(frozen=True)
class LaunchRequest:
    """A training, and the processes that do it.

    Attributes:
        job: its file, as the processes find it from their working directory.
        name: what the scheduler calls it.
        workers: processes on all hosts together, with those that are parameter servers.
        hosts: None where the scheduler decides.
        arguments: further ones of `headrace train`.
        run_dir: on a file system of all hosts; "" for the scheduler's usual place.
        cores: of each process.
        memory_gb: of each process; None for no limit.
        save_s: seconds that the end of a round and a checkpoint may take.
        cyclic: whether processes are dealt out to the hosts by turns.
        file: where it is written.
        gpus: of each process.
    """

    job: Path
    name: str
    workers: int
    hosts: int | None
    arguments: tuple[str, ...]
    run_dir: str
    cores: int
    memory_gb: float | None
    save_s: int
    cyclic: bool
    file: Path
    gpus: int = 0

    def train(self, run_dir: str) -> list[str]:
        """Returns the command of each process; a second attempt goes on from what the first one has saved."""
        command = ["headrace", "train", str(self.job), *self.arguments]
        return [*command, "--run-dir", run_dir, "--resume-if-saved"]


def shell(command: list[str]) -> str:
    """Returns a command as a shell reads it; a word that begins with $ is a variable.

    >>> shell(["headrace", "--run-dir", "$run_dir", "--strategy", "pipeline(4)"])
    'headrace --run-dir "$run_dir" --strategy \\'pipeline(4)\\''
    """
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in command)


def scheduler_name(text: str) -> str:
    """Returns a name that all schedulers take: small letters, digits and hyphens.

    >>> scheduler_name("My_job 2"), scheduler_name("7_days")
    ('my-job-2', 'job-7-days')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"job-{plain}"
    return named[:_LONGEST_NAME].strip("-")


_SBATCH = """\
#!/bin/bash
# Written by headrace launch-files. Run it where headrace is in the PATH: sbatch {file}
{options}
set -u

# By it the tasks tell strangers from each other. srun passes it on, and no command line shows it.
export HEADRACE_SECRET=${{HEADRACE_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}}
# The same for all attempts of this job, on a file system of all nodes.
run_dir={run_dir}

# scancel and preemption tell this shell, too. It waits for the tasks, which save.
trap : TERM
srun --cpus-per-task={cores} {gpus}--kill-on-bad-exit=0 \\
    {command}
code=$?

# 143: SLURM has asked the tasks to end, {save_s} s before the time limit, and they have saved: another attempt goes on
# from there. A job that scancel ends, or that SLURM itself requeues, does not run any more.
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [[ $code == 143 && $state == RUNNING ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(wanted: LaunchRequest, time_limit: str) -> str:
    """Returns the script; `time_limit` as sbatch takes it."""
    memory = {"mem-per-cpu": f"{round(1024 * wanted.memory_gb / wanted.cores)}M"} if wanted.memory_gb else {}
    options = {
        "job-name": wanted.name,
        "nodes": wanted.hosts or 1,
        "ntasks": wanted.workers,
        "cpus-per-task": wanted.cores,
        **({"gpus-per-task": wanted.gpus} if wanted.gpus else {}),
        **memory,
        **({"distribution": "cyclic"} if wanted.cyclic else {}),
        "time": time_limit,
        "output": f"{wanted.name}-%j.log",
        "open-mode": "append",
        "signal": f"TERM@{wanted.save_s}",
    }
    lines = [*(f"#SBATCH --{name}={value}" for name, value in options.items()), "#SBATCH --requeue"]
    return _SBATCH.format(
        file=wanted.file.name,
        options="\n".join(lines),
        run_dir=shell([wanted.run_dir]) if wanted.run_dir else f"runs/{wanted.name}-$SLURM_JOB_ID",
        cores=wanted.cores,
        gpus=f"--gpus-per-task={wanted.gpus} " if wanted.gpus else "",
        command=shell(wanted.train("$run_dir")),
        save_s=wanted.save_s,
    )


_ONE_HOST = """\
#!/bin/sh
# Written by headrace launch-files. Run it where headrace is in the PATH: sh {file}
exec torchrun --standalone --nproc-per-node {per_host} --no-python \\
    {command}
"""
_HOSTS = """\
#!/bin/sh
# Written by headrace launch-files. Run it on each of {hosts} hosts, with another NODE_RANK from 0 to {last}:
#     NODE_RANK=0 MASTER_ADDR=10.0.0.1 HEADRACE_SECRET_FILE=secret sh {file}
# The secret is the same on all hosts: (umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret)
: "${{NODE_RANK:?is the number of this host, from 0 to {last}}}"
: "${{MASTER_ADDR:?is the address of host 0 in the network of all}}"
exec torchrun --nnodes {hosts} --node-rank "$NODE_RANK" --nproc-per-node {per_host} \\
    --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" --no-python \\
    {command}
"""


def torchrun_script(wanted: LaunchRequest) -> str:
    """Returns the script, one for all hosts; raises UsageError where they would have unequal numbers of processes."""
    hosts = wanted.hosts or 1
    per_host = processes_of_each(wanted.workers, hosts)
    return (_ONE_HOST if hosts == 1 else _HOSTS).format(
        file=wanted.file.name,
        hosts=hosts,
        last=hosts - 1,
        per_host=per_host,
        command=shell(wanted.train(wanted.run_dir or f"runs/{wanted.name}")),
    )


def processes_of_each(workers: int, hosts: int) -> int:
    """Returns how many processes torchrun starts on each host; raises UsageError as `torchrun_script`."""
    if workers % hosts:
        raise UsageError(
            f"torchrun starts the same number of processes on each host, and {workers} workers on {hosts} hosts are "
            f"not; take {workers // hosts * hosts} or {-(-workers // hosts) * hosts} workers"
        )
    return workers // hosts
