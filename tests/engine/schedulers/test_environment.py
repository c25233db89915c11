"""What SLURM, MPI and Kubernetes say of a process, as a launcher's variables."""

from __future__ import annotations

import pytest

from headrace.engine.schedulers.environment import LAUNCHER, adopt, first_host, secret_remedy, translated
from headrace.errors import UsageError
from headrace.machine.resources import HOST_CORES

# As srun 22.05 sets them, of the task 2 of 3 on 2 nodes.
SLURM = {
    "SLURM_JOB_ID": "12001",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_NODELIST": "n[08-11]",
    "SLURM_TASKS_PER_NODE": "8(x4)",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "n09",
}
# As mpirun of Open MPI 4.1 sets them, of the second process of a host.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "3891396609",
}
# As hydra sets them, which MPICH and Intel MPI have.
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
POD = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "digits-0.digits"}


def test_a_task_of_slurm() -> None:
    assert translated(SLURM) == {
        LAUNCHER: "slurm",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n08",
        "MASTER_PORT": str(20000 + (12001 + 2000) % 12000),
        "HEADRACE_HOST": "n09",
    }


def test_the_allocation_says_what_the_step_does_not() -> None:
    without = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP_N")}
    whole = {**without, "SLURM_NTASKS": "32", "SLURM_STEP_TASKS_PER_NODE": ""}
    found = translated(whole)
    assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("32", "8", "n08")


@pytest.mark.parametrize(
    ("kind", "masks", "cores"),
    [
        # Two tasks of four cores each, and two that share them.
        ("mask_cpu:", "0x0F,0xF0", "8"),
        ("mask_cpu:", "0x3,0x3", "2"),
        ("none", "", None),
        ("mask_cpu:", "all", None),
    ],
)
def test_cores_that_slurm_divides_among_the_tasks_of_a_node(kind: str, masks: str, cores: str | None) -> None:
    bound = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPU_BIND_LIST": masks}
    assert translated({**SLURM, **bound}).get(HOST_CORES) == cores


def test_steps_at_the_same_time_have_ports_of_their_own() -> None:
    ports = {translated({**SLURM, "SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(4)}
    assert len(ports) == 4


def test_tasks_of_one_host_meet_at_the_loopback_address() -> None:
    one = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "n08", "SLURM_NODEID": "0"}
    assert translated({**SLURM, **one})["MASTER_ADDR"] == "127.0.0.1"
    assert translated(OPEN_MPI)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[09-12,20]", "n09"), ("n[7],m[1-2]", "n7"), ("r[1-2]n[3-4]-ib", "r1n3-ib")],
)
def test_the_first_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_processes_of_mpi() -> None:
    found = translated(OPEN_MPI)
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "1", "2"]
    assert 20000 <= int(found["MASTER_PORT"]) < 32000
    found = translated({**HYDRA, "MASTER_ADDR": "10.0.0.1"})
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == [
        *("3", "4", "10.0.0.1", "29500")
    ]


def test_mpirun_inside_slurm_counts_and_not_the_srun_that_it_uses() -> None:
    apart = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    found = translated({**SLURM, **OPEN_MPI, **apart})
    assert (found[LAUNCHER], found["RANK"], found["MASTER_ADDR"]) == ("mpi", "1", "n08")


def test_srun_with_pmi2_is_slurm() -> None:
    assert translated({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}) == translated(SLURM)


def test_a_pod_of_an_indexed_job() -> None:
    found = translated(POD)
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["1", "4", "1"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("digits-0.digits", "29500")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # What a batch script has, and the shell of salloc; both are no tasks.
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # Pods that train a model each.
        {"JOB_COMPLETION_INDEX": "3"},
        # torchrun, which srun has started once on each host.
        {**SLURM, "RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"},
        {**SLURM, "RANK": "5", "WORLD_SIZE": "8", LAUNCHER: "ray"},
    ],
)
def test_where_no_scheduler_has_started_several_processes_nothing_changes(environment: dict[str, str]) -> None:
    assert translated(environment) == {}


def test_what_the_user_says_counts() -> None:
    told = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "HEADRACE_HOST": "a", "RANK": "2", "WORLD_SIZE": "3"}
    found = translated({**SLURM, **told})
    assert {name: found[name] for name in told} == told
    # Then nothing is left to do.
    assert translated({**SLURM, **found}) == {}


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({**SLURM, "RANK": "0"}, "RANK=0 in the environment, and slurm says 2; unset RANK"),
        ({**POD, "RANK": "3"}, "RANK=3 in the environment, and kubernetes says 1"),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, "WORLD_SIZE=4 in the environment, and mpi says 2"),
        (HYDRA, "mpi has started 4 processes and does not say where rank 0 is; .*mpirun -x MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a"}, "has MASTER_ADDR and not WORLD_SIZE; set it to"),
        ({**POD, "JOB_COMPLETION_INDEX": "4"}, "this is rank 4 of 4 processes"),
        ({**SLURM, "SLURM_PROCID": "x"}, "sets SLURM_PROCID to a number of at least 0, and it is 'x'"),
        ({**SLURM, "SLURM_NODEID": "2"}, "SLURM_NODEID=2 and SLURM_STEP_TASKS_PER_NODE names 2 nodes"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,?"}, "is no list of counts as srun writes it"),
        ({**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, "without SLURM_NODELIST; .* --export=ALL"),
    ],
)
def test_what_does_not_fit_is_one_error(environment: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        translated(environment)


def test_each_scheduler_has_its_own_way_for_the_secret() -> None:
    assert secret_remedy({}) is None
    for environment, way in ((SLURM, "before srun"), (OPEN_MPI, "-x HEADRACE_SECRET"), (POD, "from a Secret")):
        assert way in (secret_remedy(translated(environment)) or "")


@pytest.mark.parametrize(
    ("rank", "world"), [("abc", "2"), ("0", "abc"), ("2", "2"), ("-1", "2"), ("0", "0"), ("", ""), ("0", "-1")]
)
def test_ranks_that_no_launcher_sets(rank: str, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UsageError, match=f"^RANK={rank} and WORLD_SIZE={world} in the environment name no process"):
        adopt()


def test_counts_that_are_no_numbers() -> None:
    with pytest.raises(UsageError, match="SLURM_NTASKS, is 'abc', which is no number of tasks"):
        translated({**SLURM, "SLURM_STEP_NUM_TASKS": "abc"})
    assert translated({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "prterun-a"})["MASTER_PORT"] == "20000"
