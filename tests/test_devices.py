"""The device table: a device is a row, and everything else reads it. The fake device here touches one file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import types
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import headrace as hr
from headrace import devices
from headrace.collectives.accelerators.torch_distributed import TorchDistributed
from headrace.devices import DEVICES, DeviceKind, choose, explain_auto, found, kind_of, notice_of_auto
from headrace.errors import InfeasiblePlan, UnfitMachine, UnknownName, UsageError
from headrace.machine import generators
from headrace.machine.identity import detect
from headrace.modules import move
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import device_kinds, exchanges_in_host_memory
from headrace.strategies import Strategy
from headrace.strategies.checks import check_device

MODEL = ModelSpec((ParameterSpec("weight", (4,)),))
LAYERS = (LayerSpec("first", ("weight",), 4, 1.0, 1.0, 4, 4), LayerSpec("second", (), 0, 1.0, 1.0, 4, 4))
STAGES = ModelSpec(MODEL.parameters, layers=LAYERS)


class Fake:
    """A runtime of torch with two devices and a generator, that writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.state = torch.arange(3)

    def is_initialized(self) -> bool:
        return True

    def get_device_name(self, index: int) -> str:
        return f"Fake {index}"

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        self.state = state


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Adds a device: its row."""
    runtime = Fake()
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device", backend="gloo"))
    monkeypatch.setattr(torch, "fake", runtime, raising=False)
    here = {
        "current_accelerator": lambda: types.SimpleNamespace(type="fake"),
        "device_count": lambda: 2,
        "is_available": lambda: True,
        "set_device_index": runtime.asked.append,
        "synchronize": runtime.asked.append,
    }
    for name, function in here.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    return runtime


def test_a_new_device_is_a_row(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fake", "auto"):
        cluster = detect(name)
        assert (cluster.device, cluster.hosts[0].accelerators) == ("fake", ("fake:0", "fake:1"))
    assert [role.device for role in hr.Mirrored().plan(MODEL, cluster).roles] == ["fake:0", "fake:1"]
    check_device(hr.Mirrored(), hr.Mirrored().plan(MODEL, cluster), cluster)
    with pytest.raises(InfeasiblePlan, match=r"asks for 3 workers on fake and .* has 2 such devices"):
        hr.Mirrored(3).plan(MODEL, cluster)
    assert [role.device for role in hr.FullySharded(2).plan(MODEL, cluster).roles] == ["fake:0", "fake:1"]
    plan = hr.Hybrid(hr.FullySharded(1), hr.Pipeline(2)).plan(STAGES, cluster)
    assert [role.device for role in plan.roles] == ["fake:0", "fake:1"]
    assert devices.device_names(kind_of("fake:1")) == ["Fake 0", "Fake 1"]
    monkeypatch.setattr(torch, "device", lambda name: types.SimpleNamespace(index=int(name[-1])))
    devices.use("fake:1")
    devices.synchronize(types.SimpleNamespace(type="fake"))  # type: ignore[arg-type]
    generators.set_random_states(
        {"fake": torch.ones(3)} | {name: s + 1 for name, s in generators.random_states().items()}
    )
    assert [fake.asked[0], len(fake.asked)] == [1, 2]
    assert fake.state.tolist() == [1, 2, 3]


def test_a_cluster_file_may_name_it(fake: Fake, tmp_path: object) -> None:
    file = types.SimpleNamespace(path=f"{tmp_path}/cluster.toml")
    with open(file.path, "w") as text:
        text.write('device = "fake"\n[[hosts]]\nname = "a"\ncores = 2\nmemory_gb = 1\naccelerators = 2\n')
    cluster = Cluster.load(file.path)
    assert (cluster.device, cluster.hosts[0].accelerators) == ("fake", ("fake:0", "fake:1"))


def test_auto_says_why(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain_auto("fake") == (
        "device='auto' takes fake: torch sees no CUDA device here; torch_tpu is not installed: pip install torch_tpu; "
        "torch sees no XPU here; torch sees no MPS device here; torch sees 2 fake devices here"
    )
    assert notice_of_auto("fake") == explain_auto("fake")
    monkeypatch.setattr(devices, "DEVICES", {name: kind for name, kind in DEVICES.items() if name != "fake"})
    assert choose("auto") == ("cpu", ())
    assert explain_auto("cpu").startswith("device='auto' takes cpu: torch sees no CUDA device here; ")


def test_the_plain_choice_of_a_machine_without_anything_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "DEVICES", {name: DEVICES[name] for name in ("cpu", "mps")})
    assert notice_of_auto("cpu") == ""
    monkeypatch.setitem(devices.DEVICES, "odd", DeviceKind("odd", "odd device", driver="/proc/self/status"))
    assert "torch sees no odd device here" in notice_of_auto("cpu")


def test_auto_leaves_out_what_the_strategy_cannot_run(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device", fixed_shapes=True))
    assert choose("auto", fixed_shapes=False) == ("cpu", ())
    assert choose("auto", fixed_shapes=True)[0] == "fake"
    assert choose("fake", fixed_shapes=False)[0] == "fake", "named, so that the strategy is refused with the row"


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnfitMachine, match="device='mps' and torch sees no MPS device here; use device='cpu'"):
        choose("mps")
    with pytest.raises(
        UnfitMachine, match="device='tpu' and torch_tpu is not installed: pip install torch_tpu; or use device='cpu'"
    ):
        choose("tpu")
    with pytest.raises(UnknownName, match="there is no device 'gpu'"):
        kind_of("gpu:0")
    with pytest.raises(UsageError, match="device is 'auto', 'cpu', 'cuda', 'tpu', 'xpu' or 'mps', got 'gpu'"):
        choose("gpu")


@pytest.mark.parametrize(
    ("strategy", "device", "ranks", "said"),
    [
        (
            hr.Mirrored(1),
            "tpu",
            None,
            r"mirrored has steps of several shapes .* tpu \(collectives: tpu_dist; package",
        ),
        (hr.OneDevice(), "tpu", None, "use hr.TPU, or device='cpu'"),
        (hr.Mirrored(2), "mps", None, r"2 workers of mirrored exchange .* mps \(collectives: none\); use workers=1"),
        (hr.FullySharded(2), "mps", None, r"2 workers of fully_sharded exchange .* mps \(collectives: none\)"),
        (hr.LocalSGD(2), "mps", None, "2 workers of parameter_averaging exchange tensors between devices"),
    ],
    ids=str,
)
def test_a_strategy_that_a_device_cannot_run(strategy: Strategy, device: str, ranks: int | None, said: str) -> None:
    cluster = Cluster((Host("a", 4, 2**30, tuple(f"{device}:{index}" for index in range(2))),), ranks, device)
    with pytest.raises(InfeasiblePlan, match=said):
        check_device(strategy, strategy.plan(MODEL, cluster), cluster)


def test_fit_refuses_it_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device", fixed_shapes=True))
    monkeypatch.setattr(devices, "found", lambda kind: ("fake:0",) * (kind.name == "fake"))
    job = hr.Job(
        model=lambda: nn.Linear(2, 1),
        task=hr.tasks.regression(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(torch.ones(4, 2), torch.ones(4, 1)),
        global_batch_size=2,
        steps=1,
    )
    with pytest.raises(InfeasiblePlan, match=r"one_device has steps of several shapes .* fake \(collectives: none; a"):
        hr.fit(job, hr.OneDevice(), device="fake", engine=hr.ThreadEngine())


def test_a_device_that_the_strategy_runs_on_nowhere_is_refused_before_it_is_looked_for() -> None:
    job = hr.Job(
        model=nn.Linear(2, 1),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        data=(torch.ones(4, 2), torch.ones(4, 1)),
        global_batch_size=2,
        steps=1,
    )
    for device in ("tpu", ["cpu", "tpu"]):
        with pytest.raises(InfeasiblePlan, match=r"parameter_server has steps of several shapes .* tpu \(collectives"):
            hr.fit(job, hr.ParameterServer(2), device=device)
    with pytest.raises(UnfitMachine, match="torch_tpu is not installed"):
        hr.fit(job, hr.TPU(), device="tpu")


def test_a_package_that_does_not_fit_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.0+cpu", "torch_tpu": "0.2.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=2", "torch<=2.15.0,>=2.11.0"])
    kind = kind_of("tpu")
    said = (
        "torch_tpu 0.2.0 takes torch<=2.15.0,>=2.11.0, and torch 2.10.0+cpu is installed: "
        "pip install 'torch<=2.15.0,>=2.11.0', or a version of torch_tpu that takes this one"
    )
    assert devices.package_problem(kind) == said
    assert found(kind) == ()
    with pytest.raises(UnfitMachine, match=r"torch_tpu 0\.2\.0 takes torch"):
        choose("tpu")
    for said_otherwise in ("Torch<=2.15.0,>=2.11.0", "torch (<=2.15.0,>=2.11.0)"):
        monkeypatch.setattr(importlib.metadata, "requires", lambda name, text=said_otherwise: [text])
        assert devices.package_problem(kind) == said
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch ~~ 2"])
    assert devices.package_problem(kind) == (
        "torch_tpu 0.2.0 requires 'torch ~~ 2', which cannot be read: install it again"
    )
    other = "torch==2.9; python_version < '3'"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [other, "torch<=2.15.0,>=2.11.0"])
    assert devices.package_problem(kind) == said
    versions["torch"] = "2.15.0+cpu"
    assert devices.package_problem(kind) == ""
    with pytest.raises(UnfitMachine, match="torch sees no TPU here, with torch_tpu; use device='cpu', or a host"):
        choose("tpu")


def test_a_device_without_collectives_connects_nothing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device"))
    with pytest.raises(UnfitMachine, match=r"no backend for fake \(collectives: none\)"):
        TorchDistributed(HashStore(), 0, 1, "fake:0", 1.0)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_random_numbers_come_back(draw: Callable[[int], torch.Tensor]) -> None:
    torch.manual_seed(3)
    with generators.forked_generators(nn.Linear(2, 1)):
        inside = draw(2)
    assert torch.equal(draw(2), inside)


@pytest.mark.parametrize(
    ("device", "kind", "accelerators", "each"),
    [
        (["fake:1", "cpu"], "fake", ("fake:1",), ("fake:1", "cpu")),
        ("cpu, fake:0,fake:0", "fake", ("fake:0",), ("cpu", "fake:0", "fake:0")),
        ("fake:1", "fake", ("fake:1",), ("fake:1",)),
        (("cpu", "cpu"), "cpu", (), ("cpu", "cpu")),
        (["cpu"], "cpu", (), ("cpu",)),
        ("fake", "fake", ("fake:0", "fake:1"), ()),
    ],
    ids=str,
)
def test_devices_are_named_one_for_each_worker(
    fake: Fake, device: Sequence[str], kind: str, accelerators: tuple[str, ...], each: tuple[str, ...]
) -> None:
    cluster = detect(device)
    (host,) = cluster.hosts
    assert (cluster.device, host.accelerators, host.worker_devices) == (kind, accelerators, each)
    plan = hr.Mirrored().plan(MODEL, cluster)
    assert tuple(role.device for role in plan.roles) == (each or accelerators)
    assert hr.ParameterServer().plan(MODEL, cluster).workers == plan.workers


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [
        ([], UsageError, r"or a list with the device of each worker, device=\['cuda:0', 'cpu'\], got \[\]"),
        (3, UsageError, "device is the name of a kind of device, .* got 3"),
        (["cpu", 0], UsageError, r"got \['cpu', 0\]"),
        (["cpu", "gpu"], UsageError, "device is 'cpu', 'cuda', 'tpu', 'xpu', 'mps' or 'fake', got 'gpu'"),
        ("cpu,auto", UsageError, "got 'auto'"),
        ("cpu,", UsageError, "got ''"),
        ("cpu:0", UsageError, "device 'cpu:0' has a number, and all workers on CPUs share the cores; use 'cpu'"),
        (["fake", "cpu"], UsageError, "device 'fake' has no number: torch sees fake:0, fake:1; use one of them, or"),
        (
            "fake:2,cpu",
            UnfitMachine,
            "device 'fake:2' is not here: torch sees fake:0, fake:1; use one of them, or 'cpu'",
        ),
        ("cuda:0,cpu", UnfitMachine, "device='cuda' and torch sees no CUDA device here; use device='cpu', or a CUDA"),
    ],
    ids=str,
)
def test_names_that_are_none(fake: Fake, device: Sequence[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        detect(device)


@pytest.mark.parametrize(
    ("strategy", "count"), [(hr.Mirrored(3), "3 workers"), (hr.OneDevice(), "1 worker"), (hr.Downpour(1), "1 worker")]
)
def test_there_is_one_name_for_each_worker(fake: Fake, strategy: Strategy, count: str) -> None:
    said = f"device names 2 devices on .*, fake:0, cpu, and {strategy.name} has {count} there; name one for each"
    with pytest.raises(InfeasiblePlan, match=said):
        strategy.plan(MODEL, detect("fake:0,cpu"))


MIXING = (hr.Mirrored(), hr.ParameterServer(), hr.Downpour(), hr.LocalSGD(), hr.ParameterAveraging(via="server"))


def test_which_strategies_mix_kinds_of_devices(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device"))
    cluster = detect("fake:0,cpu")
    assert cluster.kinds == ("fake", "cpu")
    for strategy in MIXING:
        plan = strategy.plan(MODEL, cluster)
        assert (device_kinds(plan), exchanges_in_host_memory(plan)) == (("fake", "cpu"), True)
        # Without a backend: what they exchange does not need one.
        check_device(strategy, plan, cluster)
    for refused in (hr.CentralStorage(), hr.Gossip(), hr.Unconnected(), hr.FullySharded()):
        said = rf"{refused.name} exchanges .* fake \(collectives: none\) and cpu \(collectives: gloo\); give all"
        with pytest.raises(InfeasiblePlan, match=said):
            check_device(refused, refused.plan(MODEL, cluster), cluster)
    monkeypatch.setitem(DEVICES, "fake", DeviceKind("fake", "fake device", fixed_shapes=True))
    with pytest.raises(InfeasiblePlan, match=r"has steps of several shapes .* fake .* use hr.TPU"):
        check_device(MIXING[1], MIXING[1].plan(MODEL, cluster), cluster)


@pytest.mark.parametrize(
    ("device", "through_host"),
    [("fake:0,fake:1", False), ("fake:0,fake:0", True), ("cpu,cpu", False), ("cpu,fake:1", True)],
)
def test_what_goes_through_host_memory(fake: Fake, device: str, through_host: bool) -> None:
    assert exchanges_in_host_memory(hr.Mirrored().plan(MODEL, detect(device))) == through_host
    # Of processes that serve, none exchanges by a backend.
    assert exchanges_in_host_memory(hr.ParameterServer().plan(MODEL, detect(device))) == through_host


def on_two_hosts(first: tuple[str, ...], second: tuple[str, ...], servers: int = 0) -> Cluster:
    count = len(first) + len(second) + servers
    ranks = range(len(first)), range(len(first), count)
    hosts = zip("ab", (first, second), ranks, strict=True)
    return Cluster(
        tuple(Host(name, 4, 2**30, ranks=tuple(own), worker_devices=names) for name, names, own in hosts), count, "fake"
    )


def test_each_host_brings_its_own(fake: Fake) -> None:
    cluster = on_two_hosts(("fake:0", "fake:1"), ("cpu",))
    for strategy in (hr.Mirrored(), hr.LocalSGD()):
        plan = strategy.plan(MODEL, cluster)
        assert [(role.host, role.device) for role in plan.roles] == [("a", "fake:0"), ("a", "fake:1"), ("b", "cpu")]
        check_device(strategy, plan, cluster)
    served = hr.ParameterServer().plan(MODEL, on_two_hosts(("fake:0", "fake:1"), (), servers=1))
    assert [(role.host, role.device) for role in served.roles] == [("a", "fake:0"), ("a", "fake:1"), ("b", "cpu")]
    far = on_two_hosts(("fake:0",), ("fake:0",))
    for strategy in (hr.Mirrored(), hr.Gossip()):
        plan = strategy.plan(MODEL, far)
        check_device(strategy, plan, far)
        assert exchanges_in_host_memory(plan)
        assert not exchanges_in_host_memory(dataclasses.replace(plan, trusted=True))
        assert exchanges_in_host_memory(dataclasses.replace(plan, trusted=True, min_workers=1))
    mixed = on_two_hosts(("fake:0",), ("cpu",))
    with pytest.raises(InfeasiblePlan, match=r"gossip exchanges .* of one kind, .* fake \(collectives: gloo\) and cpu"):
        check_device(hr.Gossip(), hr.Gossip().plan(MODEL, mixed), mixed)
    with pytest.raises(InfeasiblePlan, match="device names 1 device on b, cpu, and parameter_server has 0 workers"):
        hr.ParameterServer().plan(MODEL, on_two_hosts(("fake:0",), ("cpu",)))


def test_only_engines_of_this_machine_take_names() -> None:
    for device in (["cuda:0", "cpu"], "tpu"):
        with pytest.raises(
            UsageError, match="RayEngine reserves CPUs or GPUs for the workers, device is 'auto', 'cpu'"
        ):
            hr.RayEngine().cluster(hr.Mirrored(2), device, True)


def test_what_is_tied_stays_tied_on_another_device() -> None:
    """As on devices of PyTorch's extension point, `Module.to` makes new parameters there."""
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False), "norm": nn.BatchNorm1d(2)}
    )
    model["head"].weight = model["embedding"].weight
    model.register_buffer("mean", model["norm"].running_mean)
    move(model, "meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert model["head"].weight is model["embedding"].weight
    assert model.mean is model["norm"].running_mean
