"""A script with the command of torchrun."""

from __future__ import annotations

from headrace.cli.launch_files.request import LaunchRequest, shell
from headrace.errors import UsageError

_ONE_HOST = """\
#!/bin/sh
# Written by headrace launch-files. Run it where headrace is in the PATH: sh {file}
exec torchrun --standalone --nproc-per-node {each} --no-python \\
    {command}
"""
_HOSTS = """\
#!/bin/sh
# Written by headrace launch-files. Run it on each of {hosts} hosts, with another NODE_RANK from 0 to {last}:
#     NODE_RANK=0 MASTER_ADDR=10.0.0.1 HEADRACE_SECRET_FILE=secret sh {file}
# The secret is the same on all hosts: (umask 077; python -c "import secrets; print(secrets.token_hex(32))" > secret)
: "${{NODE_RANK:?is the number of this host, from 0 to {last}}}"
: "${{MASTER_ADDR:?is the address of host 0 in the network of all}}"
exec torchrun --nnodes {hosts} --node-rank "$NODE_RANK" --nproc-per-node {each} \\
    --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" --no-python \\
    {command}
"""


def torchrun_script(wanted: LaunchRequest) -> str:
    """Returns the script, one for all hosts; raises UsageError where they would have unequal numbers of processes."""
    hosts = wanted.hosts or 1
    each = processes_of_each(wanted.workers, hosts)
    return (_ONE_HOST if hosts == 1 else _HOSTS).format(
        file=wanted.file.name,
        hosts=hosts,
        last=hosts - 1,
        each=each,
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
