"""Translates what SLURM, MPI or Kubernetes says of a process into RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

One place does it, before anything else reads these variables. All but `adopt` are functions of a mapping.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from headrace.errors import UsageError
from headrace.machine.resources import HOST_CORES

LAUNCHER = "HEADRACE_LAUNCHER"
"""Says who has set RANK and the others; then no scheduler around it counts."""

_INNER = (LAUNCHER, "TORCHELASTIC_RUN_ID")
"""Launchers' own variables: torchrun is often started by srun, one for each host."""

_PORT = 29500
_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux gives to connections, which begin at 32768."""

_MASK = re.compile("0x[0-9A-Fa-f]+")

_SECRET_REMEDIES = {
    "slurm": "run this before srun, which passes it on: export {}",
    "mpi": "run this before mpirun, and name it there (mpirun -x HEADRACE_SECRET): export {}",
    "kubernetes": "give all pods one HEADRACE_SECRET from a Secret, as headrace launch-files kubernetes writes it: {}",
}
_MAKE = 'HEADRACE_SECRET=$(python -c "import secrets; print(secrets.token_hex(32))")'


def adopt() -> None:
    """Sets in this process's environment what its scheduler says of it.

    Raises UsageError where it says too little, or something else than RANK and WORLD_SIZE do, or these are no rank and
    number of processes.
    """
    os.environ.update(translated(os.environ))
    _check_ranks(os.environ)


def _check_ranks(environment: Mapping[str, str]) -> None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return
    rank, world = environment["RANK"], environment["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={world} in the environment name no process of a launcher: WORLD_SIZE is how "
            "many there are, and RANK counts them from 0; unset both where no launcher has set them"
        )


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are to be set; none without a scheduler, or where it has started one process alone.

    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
    >>> step |= {"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> found = translated({**step, "SLURM_STEP_NODELIST": "n[01-02]"})
    >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]
    ('2', '3', 'n01', '20007')
    """
    if any(name in environment for name in _INNER):
        return {}
    # The innermost first: mpirun starts its own processes by srun.
    found = _open_mpi(environment) or _pmi(environment) or _slurm(environment) or _indexed_job(environment)
    if found is None or found["WORLD_SIZE"] == "1":
        return {}
    _compare(environment, found)
    if not (environment.get("MASTER_ADDR") or found["MASTER_ADDR"]):
        raise UsageError(
            f"{found[LAUNCHER]} has started {found['WORLD_SIZE']} processes and does not say where rank 0 is; give all "
            "its address: MASTER_ADDR in the environment (mpirun -x MASTER_ADDR=...)"
        )
    return {name: environment.get(name) or value for name, value in found.items()}


def secret_remedy(environment: Mapping[str, str]) -> str | None:
    """Returns how all processes of a scheduler get the run's secret; None without a scheduler."""
    remedy = _SECRET_REMEDIES.get(environment.get(LAUNCHER, ""))
    return remedy and remedy.format(_MAKE)


def _slurm(environment: Mapping[str, str]) -> dict[str, str] | None:
    # A batch script has SLURM_PROCID=0, and is no task of a step.
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    tasks = _slurm_value(environment, "NUM_TASKS", "NTASKS")
    if not tasks.isdecimal():
        raise UsageError(f"SLURM_STEP_NUM_TASKS, or SLURM_NTASKS, is {tasks!r}, which is no number of tasks; unset it")
    if tasks == "1":
        return {"WORLD_SIZE": tasks}
    per_node = _counts(_slurm_value(environment, "TASKS_PER_NODE", "TASKS_PER_NODE"))
    step, job, node = (_number(environment, f"SLURM_{name}") for name in ("STEP_ID", "JOB_ID", "NODEID"))
    if node >= len(per_node):
        raise UsageError(f"SLURM_NODEID={node} and SLURM_STEP_TASKS_PER_NODE names {len(per_node)} nodes; unset them")
    found = {
        **_ranks("slurm", _number(environment, "SLURM_PROCID"), int(tasks)),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": (
            "127.0.0.1" if len(per_node) == 1 else first_host(_slurm_value(environment, "NODELIST", "NODELIST"))
        ),
        "MASTER_PORT": _port(job + 1000 * step),
    }
    # As SLURM's own messages name it.
    more = {"HEADRACE_HOST": environment.get("SLURMD_NODENAME"), HOST_CORES: _bound_cores(environment)}
    return found | {name: value for name, value in more.items() if value}


def _bound_cores(environment: Mapping[str, str]) -> str:
    """Returns how many cores the tasks of this node have together; "" where SLURM has bound none of them to its own."""
    masks = environment.get("SLURM_CPU_BIND_LIST", "").split(",")
    if not environment.get("SLURM_CPU_BIND_TYPE", "").startswith("mask_cpu") or not all(map(_MASK.fullmatch, masks)):
        return ""
    together = 0
    for mask in masks:
        together |= int(mask, 16)
    return str(together.bit_count())


def _slurm_value(environment: Mapping[str, str], of_step: str, of_job: str) -> str:
    value = environment.get(f"SLURM_STEP_{of_step}") or environment.get(f"SLURM_{of_job}")
    if not value:
        raise UsageError(f"srun has started this process without SLURM_{of_job}; start it by srun --export=ALL")
    return value


def first_host(nodes: str) -> str:
    """Returns the first name of SLURM's list of nodes.

    >>> first_host("gpu[003-010,12],x5"), first_host("x5,gpu[1-2]"), first_host("rack[0-1]n[2,4]")
    ('gpu003', 'x5', 'rack0n2')
    """
    one = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", one[0]) if one else ""


def _counts(text: str) -> list[int]:
    """Returns how many tasks each node has.

    >>> _counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each) for each in text.split(",")]
    if not all(found):
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is no list of counts as srun writes it; unset it")
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def _open_mpi(environment: Mapping[str, str]) -> dict[str, str] | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    rank, world, local_rank, local_world = (
        _number(environment, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    # One number for all processes of an mpirun.
    job = environment.get("OMPI_MCA_ess_base_jobid", "")
    port = _port(int(job) if job.isdecimal() else 0)
    return _mpi(environment, _ranks("mpi", rank, world), (local_rank, local_world), port)


def _pmi(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Of MPICH, Intel MPI and others that are built on hydra."""
    own = environment.get("PMI_RANK"), environment.get("PMI_SIZE")
    # srun --mpi=pmi2 sets both, and SLURM says more.
    if None in own or own == (environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")):
        return None
    found = _ranks("mpi", _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE"))
    local = None
    if "MPI_LOCALRANKID" in environment:
        local = _number(environment, "MPI_LOCALRANKID"), _number(environment, "MPI_LOCALNRANKS")
    return _mpi(environment, found, local, str(_PORT))


def _mpi(
    environment: Mapping[str, str], found: dict[str, str], local: tuple[int, int] | None, port: str
) -> dict[str, str]:
    found |= {"MASTER_ADDR": "", "MASTER_PORT": port}
    if local:
        found |= {"LOCAL_RANK": str(local[0]), "LOCAL_WORLD_SIZE": str(local[1])}
    if found["WORLD_SIZE"] == found.get("LOCAL_WORLD_SIZE"):
        found["MASTER_ADDR"] = "127.0.0.1"
    elif "SLURM_NODELIST" in environment:
        # There mpirun gives rank 0 to the first host.
        found["MASTER_ADDR"] = first_host(environment["SLURM_NODELIST"])
    return found


def _indexed_job(environment: Mapping[str, str]) -> dict[str, str] | None:
    if "JOB_COMPLETION_INDEX" not in environment or not {"WORLD_SIZE", "MASTER_ADDR"} & set(environment):
        return None
    if "WORLD_SIZE" not in environment:
        raise UsageError(
            "this pod of an Indexed Job has MASTER_ADDR and not WORLD_SIZE; set it to the Job's completions, as "
            "headrace launch-files kubernetes does"
        )
    rank, world = _number(environment, "JOB_COMPLETION_INDEX"), _number(environment, "WORLD_SIZE")
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**_ranks("kubernetes", rank, world), **local, "MASTER_ADDR": "", "MASTER_PORT": str(_PORT)}


def _ranks(launcher: str, rank: int, world: int) -> dict[str, str]:
    if rank >= world:
        raise UsageError(f"{launcher} says that this is rank {rank} of {world} processes; ranks begin at 0")
    return {LAUNCHER: launcher, "RANK": str(rank), "WORLD_SIZE": str(world)}


def _compare(environment: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        given = environment.get(name, found[name])
        if given != found[name]:
            raise UsageError(
                f"{name}={given} in the environment, and {found[LAUNCHER]} says {found[name]}; unset RANK and "
                f"WORLD_SIZE, or say that another launcher has set them: {LAUNCHER}=NAME"
            )


def _port(job: int) -> str:
    return str(_FIRST_PORT + job % _PORTS)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"the scheduler sets {name} to a number of at least 0, and it is {text!r}")
    return int(text)
