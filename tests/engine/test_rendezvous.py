"""What the processes of a launcher know of each other's hosts."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from headrace.engine.torchrun import store
from headrace.engine.torchrun.address import own_address, start_timeout_s
from headrace.engine.torchrun.store import joined, of_first
from headrace.errors import InfeasiblePlan, UsageError, WorkerFailed
from headrace.machine.identity import host_name
from headrace.spec.cluster import Cluster, Host, Link


def seen(*names: str) -> list[Cluster]:
    return [Cluster((Host(name, 2, 2**30 + rank),), len(names)) for rank, name in enumerate(names)]


def test_processes_of_one_host_are_where_the_first_is() -> None:
    assert joined(seen("a", "a", "a")) == Cluster((Host("a", 2, 2**30),), 3)


def test_every_host_is_listed_once_with_its_ranks() -> None:
    hosts = (Host("b", 2, 2**30, ranks=(0, 2)), Host("a", 2, 2**30 + 1, ranks=(1, 3)))
    assert joined(seen("b", "a", "b", "a")) == Cluster(hosts, 4)


def test_the_links_are_those_that_rank_0_knows() -> None:
    known, other = (Cluster((Host("a", 1, 1),), links=(Link("a", "b", rate),)) for rate in (1e6, 2e6))
    mine, theirs = seen("a", "b")
    assert joined([mine.with_links_of(known), theirs.with_links_of(other)]).links == known.links
    with pytest.raises(UsageError, match="there is no host 'b' of the given cluster; known: a"):
        known.require(joined([mine, theirs]).hosts)


def test_devices_of_two_kinds_are_refused() -> None:
    gpu, other = (
        Cluster((Host(name, 2, 2**30, (f"{kind}:0",)),), 2, kind) for name, kind in (("b", "cuda"), ("a", "xpu"))
    )
    with pytest.raises(
        InfeasiblePlan,
        match=r"different devices: xpu on a, cuda on b; say the same device= on all, or name those of each",
    ):
        joined([other, gpu])


def named(host: str, *devices: str, kind: str = "cpu", world: int = 2) -> Cluster:
    accelerators = tuple(device for device in devices if device != "cpu")
    return Cluster((Host(host, 2, 2**30, accelerators, worker_devices=devices),), world, kind)


def test_each_host_names_the_devices_of_its_workers() -> None:
    gpu = named("a", "cuda:0", "cuda:0", kind="cuda", world=3)
    for other in (named("b", "cpu", world=3), named("b", world=3)):
        for seen_by in ([gpu, gpu, other], [other, gpu, gpu]):
            cluster = joined(seen_by)
            assert (cluster.device, cluster.kinds, cluster.ranks) == ("cuda", tuple(dict.fromkeys(cluster.kinds)), 3)
            assert set(cluster.kinds) == {"cuda", "cpu"}
            assert {host.name: host.worker_devices for host in cluster.hosts}["a"] == ("cuda:0", "cuda:0")
    one = named("a", "cuda:0", "cpu", kind="cuda")
    assert joined([one, one]) == one


@pytest.mark.parametrize(
    ("seen_by", "said"),
    [
        (
            [named("a", "cuda:0", kind="cuda"), named("a", "cuda:1", kind="cuda")],
            "the processes of a name different devices: rank 0 says cuda:0, rank 1 says cuda:1; let each name those of",
        ),
        (
            [named("a", "cpu"), Cluster((Host("b", 2, 2**30, ("cuda:0",)),), 2, "cuda")],
            r"and b says cuda; name them there, too, device=\['cuda:0', 'cpu'\]",
        ),
    ],
)
def test_names_that_do_not_fit_together(seen_by: list[Cluster], said: str) -> None:
    with pytest.raises(InfeasiblePlan, match=said):
        joined(seen_by)


def test_an_address_that_no_other_host_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOST", "first")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match=r"^MASTER_ADDR=localhost is (127\.0\.0\.1|::1) on first, which no other host"):
        own_address()


def test_a_host_is_called_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_HOST", raising=False)
    system = host_name()
    monkeypatch.setenv("HEADRACE_HOST", "another")
    assert system != "another" == host_name()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the ranks say to each other, who come one after the other."""
    texts: list[str] = []

    def gather(text: str) -> list[str]:
        texts.append(text)
        return texts

    monkeypatch.setattr(store, "gather", gather)
    monkeypatch.setattr(store, "comes_back", lambda: False)
    return texts


def only_the_first_makes_it() -> str:
    raise AssertionError("rank 0 has made it")


def test_what_rank_0_makes_all_have(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert of_first(lambda: "made") == "made"
    monkeypatch.setenv("RANK", "1")
    assert of_first(only_the_first_makes_it) == "made"


def test_what_stops_rank_0_stops_all(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise InfeasiblePlan("too many stages")

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InfeasiblePlan, match="too many stages"):
        of_first(refuse)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(WorkerFailed, match=r"rank 0 on .* failed: what it prints says why") as failed:
        of_first(only_the_first_makes_it)
    assert failed.value.worker_exit_code == InfeasiblePlan.exit_code


def test_beside_an_agent_that_has_the_port_the_first_says_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    asked: list[tuple[str, bytes]] = []

    def serve(address: str, secret: bytes) -> str:
        asked.append((address, secret))
        return "tcp://127.0.0.1:5"

    monkeypatch.setattr(store, "_serve", serve)
    launched = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    first, second = store._at_master(0, b"secret"), store._at_master(1, b"secret")
    assert first() == second() == "tcp://127.0.0.1:5"
    # The agents start all processes again, and the next rank 0 listens elsewhere.
    agent.set("headrace/store", "tcp://127.0.0.1:6")
    assert second() == "tcp://127.0.0.1:6"
    assert asked == [("tcp://127.0.0.1:0", b"secret")]


def test_without_a_secret_another_host_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # An address that is for documentation, and no machine's (RFC 5737).
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UsageError, match=r"^rank 1 on .* several hosts, and have no secret .*; make one: \(umask 077"):
        store._on_one_host(1, 2, "192.0.2.1:1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UsageError, match=r"^rank 0 on .* several hosts, and have no secret"):
        store._on_one_host(0, 2, "127.0.0.1:1")


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan"])
def test_a_start_timeout_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("HEADRACE_START_TIMEOUT_S", given)
    with pytest.raises(UsageError, match="must be a number of seconds above 0"):
        start_timeout_s()
