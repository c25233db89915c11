"""hr.rehearse: what it computes is what real workers compute, and what it cannot compute it refuses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file
from torch import Tensor, nn

import headrace as hr
from headrace.api.rehearsal.setup import _threads
from headrace.engine.threads import ThreadEngine
from headrace.errors import DataError, InfeasiblePlan, JobError, NonFiniteLoss, UsageError
from headrace.spec.cluster import Host
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.events import NonFinite, PushesApplied, ServerStarted, Stepped, WorkerStarted, decode, encode
from headrace.spec.model import ModelSpec, ParameterSpec

EXAMPLES, BATCH = 192, 32
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
PARAMETERS = (
    ParameterSpec("0.weight", (16, 8)), ParameterSpec("0.bias", (16,)),
    ParameterSpec("3.weight", (3, 16)), ParameterSpec("3.bias", (3,)),
)  # fmt: skip
CLUSTER = hr.Cluster(tuple(Host(f"h{index}", 2, 10**9) for index in range(17)))
MODEL = ModelSpec(PARAMETERS, compute=ComputeProfile((BatchProfile(8, 0.001, 0.002),), 0.0005, 0.0001, 0.2))


def mlp() -> nn.Module:
    """A model that draws random numbers, as each worker has its own."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def job(epochs: int = 2, **options: object) -> hr.Job:
    torch.manual_seed(0)
    inputs = torch.randn(EXAMPLES, 8)
    target = inputs[:, :3].argmax(dim=1)
    options = {"model": mlp, "optimizer": SGD, **options}
    return hr.Job(
        task=hr.tasks.multiclass(3), data=(inputs, target), eval_data=(inputs[:50], target[:50]),
        global_batch_size=BATCH, epochs=epochs, seed=1, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def model_of(folder: Path) -> Mapping[str, Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.ParameterServer(workers=4),
        hr.Downpour(workers=4, push_every=3, fetch_every=2),
        hr.Downpour(workers=4, push_every=1, fetch_every=1, overlap=False),
        hr.Downpour(workers=3, push_every=2, fetch_every=2, overlap=False, push_codec="int8"),
        hr.Mirrored(workers=4),
    ],
    ids=["asynchronous", "downpour", "downpour-each-step", "downpour-int8", "mirrored"],
)
def test_a_real_run_is_computed_again_bit_for_bit(strategy: hr.Strategy, tmp_path: Path) -> None:
    real = hr.fit(job(), strategy, device="cpu", run_dir=tmp_path / "real", checkpoints=False)
    again = hr.rehearse(job(), from_run=tmp_path / "real", run_dir=tmp_path / "again")
    assert equal(model_of(tmp_path / "real"), model_of(tmp_path / "again"))
    losses = [
        sorted((e.rank, e.step, e.lease, e.loss) for e in run.events if isinstance(e, Stepped) and e.examples)
        for run in (real, again.run)
    ]
    assert losses[0] == losses[1]
    assert sum(event.examples for event in again.run.events if isinstance(event, Stepped)) == 2 * EXAMPLES


@pytest.mark.slow
def test_what_a_skipped_step_has_changed_besides_is_undone(tmp_path: Path) -> None:
    given = job(model=_normed, options=hr.Options(on_nonfinite="skip"))
    inputs, target = given.data
    bad = inputs.clone()
    bad[7] = torch.nan
    given = replace(given, data=(bad, target), eval_data=(inputs[:50], target[:50]))
    real = hr.fit(given, hr.ParameterServer(workers=2), device="cpu", run_dir=tmp_path / "real", checkpoints=False)
    again = hr.rehearse(given, from_run=tmp_path / "real", run_dir=tmp_path / "again").run
    assert equal(model_of(tmp_path / "real"), model_of(tmp_path / "again"))
    skipped = [sorted((e.rank, e.step) for e in run.events if isinstance(e, NonFinite)) for run in (real, again)]
    assert len(skipped[0]) == 2
    assert skipped[0] == skipped[1]


@pytest.mark.slow
def test_one_mirror_for_all_gives_the_bits_of_many(tmp_path: Path) -> None:
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4)
    options = hr.Options(clip_norm=0.5, ema_decay=0.9, warmup=2, schedule=schedule, batch_norm="sync")
    for index, optimizer in enumerate((SGD, functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1))):
        given = job(model=_normed, optimizer=optimizer, options=options)
        real, again = tmp_path / f"real-{index}", tmp_path / f"again-{index}"
        trained = hr.fit(given, hr.Mirrored(workers=5), device="cpu", run_dir=real, checkpoints=False)
        rehearsed = hr.rehearse(given, from_run=real, run_dir=again)
        assert equal(model_of(real), model_of(again))
        assert rehearsed.run.metrics == trained.metrics


@pytest.mark.slow
def test_hooks_of_parameters_act_in_a_rehearsal(tmp_path: Path) -> None:
    given = job(model=_hooked)
    hr.fit(given, hr.Mirrored(workers=3), device="cpu", run_dir=tmp_path / "real", checkpoints=False)
    hr.rehearse(given, from_run=tmp_path / "real", run_dir=tmp_path / "again")
    assert equal(model_of(tmp_path / "real"), model_of(tmp_path / "again"))


def _hooked() -> nn.Module:
    module = nn.Linear(8, 3)
    module.weight.register_hook(lambda gradient: gradient * 0.25)
    return module


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


class _Halved(nn.Linear):
    """Changes a parameter in forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.mul_(0.5)
        return super().forward(inputs)


def test_a_model_that_changes_parameters_in_forward_has_no_shared_mirror(tmp_path: Path) -> None:
    spec = replace(MODEL, parameters=(ParameterSpec("weight", (3, 8)), ParameterSpec("bias", (3,))))
    with pytest.raises(JobError, match="changes its parameter 'bias' in forward"):
        hr.rehearse(
            job(model=functools.partial(_Halved, 8, 3)), hr.Mirrored(workers=2), model=spec, run_dir=tmp_path / "a"
        )


@pytest.mark.slow
def test_another_order_of_the_same_pushes_gives_other_bits(tmp_path: Path) -> None:
    """So that equality says something."""
    hr.fit(job(), hr.ParameterServer(workers=4), device="cpu", run_dir=tmp_path / "real", checkpoints=False)
    rehearsed = hr.rehearse(job(), hr.ParameterServer(workers=4), model=MODEL, run_dir=tmp_path / "other")
    assert not equal(model_of(tmp_path / "real"), model_of(tmp_path / "other"))
    assert rehearsed.run.plan.workers == 4


def test_workers_in_lock_step_equal_one_device(tmp_path: Path) -> None:
    plain = job(model=lambda: nn.Linear(8, 3))
    spec = replace(MODEL, parameters=(ParameterSpec("weight", (3, 8)), ParameterSpec("bias", (3,))))
    one = hr.fit(plain, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), run_dir=tmp_path / "one")
    for index, strategy in enumerate([hr.ParameterServer(workers=4, staleness_bound=0), hr.Mirrored(workers=4)]):
        many = hr.rehearse(plain, strategy, model=spec, run_dir=tmp_path / str(index))
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(many.run.model.state_dict()[name], value)
        assert many.run.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-5)


def test_more_workers_are_staler_and_two_rehearsals_are_the_same(tmp_path: Path) -> None:
    staleness = []
    for workers in (2, 16):
        found = hr.rehearse(job(), hr.ParameterServer(workers=workers), model=MODEL, run_dir=tmp_path / str(workers))
        assert found.run.summary.servers is not None
        staleness.append(found.run.summary.servers.staleness)
        steps = [event for event in found.run.events if isinstance(event, Stepped)]
        assert sum(event.examples for event in steps) == 2 * EXAMPLES
        assert max(event.time_s for event in steps) <= found.virtual_s
    most = [max(max(each.counts) for each in counts.values()) for counts in staleness]
    assert most[0] < 4 < most[1]
    again = hr.rehearse(job(), hr.ParameterServer(workers=16), model=MODEL, run_dir=tmp_path / "again")
    assert equal(model_of(tmp_path / "16"), model_of(tmp_path / "again"))
    other = hr.rehearse(
        job(), hr.ParameterServer(workers=16), model=MODEL, assumptions=hr.Assumptions(seed=7), run_dir=tmp_path / "7"
    )
    assert other.virtual_s != again.virtual_s


@pytest.mark.parametrize(
    "strategy",
    [
        hr.ParameterServer(workers=4, backup_workers=1),
        hr.ParameterServer(workers=4, staleness_bound=1, servers=2, pull_codec="bf16"),
        hr.Downpour(workers=4, push_every=2, warmstart_steps=2),
        hr.ParameterAveraging(workers=3, period=2),
    ],
    ids=["backups", "bounded", "downpour", "averaging"],
)
def test_every_example_of_an_epoch_counts_once(strategy: hr.Strategy, tmp_path: Path) -> None:
    found = hr.rehearse(job(epochs=1), strategy, model=MODEL, run_dir=tmp_path / "a")
    steps = [event for event in found.run.events if isinstance(event, Stepped)]
    assert sum(event.examples for event in steps) == EXAMPLES
    assert found.run.summary.curves.evaluations[-1].step == EXAMPLES // BATCH
    assert found.run.status == "ok"
    assert found.memory_bytes > 0
    began = {event.rank: event.host for event in found.run.events if isinstance(event, WorkerStarted | ServerStarted)}
    assert began == {role.rank: role.host for role in found.run.plan.roles}


def test_a_gradient_that_is_not_finite_ends_it_as_it_ends_a_run(tmp_path: Path) -> None:
    wild = job(optimizer=functools.partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(NonFiniteLoss, match="the loss is"):
        hr.rehearse(wild, hr.ParameterServer(workers=2), model=MODEL, run_dir=tmp_path / "a")


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (hr.Pipeline(stages=2), "its workers hold parts of one model"),
        (hr.ParameterAveraging(workers=2, via="server"), "average through servers"),
        (hr.ParameterAveraging(workers=2, period="auto"), "give a number of rounds"),
        (hr.Mirrored(workers=2, balance="speed"), "balance='equal'"),
        (hr.Unconnected(workers=2), "never exchange anything"),
        (hr.Downpour(workers=2, backups=1), "backups=0"),
        (hr.Downpour(workers=2, local="optimizer"), "use local='sgd'"),
        (hr.ParameterServer(workers=64), "leaves some of 64 replicas without one"),
        (None, "needs a strategy"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(strategy: hr.Strategy | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        hr.rehearse(job(), strategy, model=MODEL, run_dir=tmp_path / "a")


def test_a_profile_of_something_else_is_refused_unless_forced(tmp_path: Path) -> None:
    strategy = hr.ParameterServer(workers=2)
    for wrong, says in (
        (replace(MODEL, parameters=PARAMETERS[:2]), "bytes of trainable parameters"),
        (replace(MODEL, origin={"torch": "1.0.0"}), "torch: 1.0.0, and here"),
        (replace(MODEL, origin={"digest": "0" * 16}), "the form of its examples"),
    ):
        with pytest.raises(UsageError, match=says):
            hr.rehearse(job(epochs=1), strategy, model=wrong, run_dir=tmp_path / "a")
    found = hr.rehearse(job(epochs=1), strategy, model=wrong, run_dir=tmp_path / "b", force=True)
    assert found.virtual_s > 0


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.rehearsal.setup.spare_memory_bytes", lambda: 10_000)
    with pytest.raises(InfeasiblePlan, match="free here"):
        hr.rehearse(job(epochs=1), hr.ParameterServer(workers=16), CLUSTER, model=MODEL)


def test_a_run_without_a_record_is_refused(tmp_path: Path) -> None:
    hr.rehearse(job(epochs=1), hr.ParameterServer(workers=2), model=MODEL, run_dir=tmp_path / "a")
    with pytest.raises(UsageError, match="no recorded order"):
        hr.rehearse(job(epochs=1), from_run=tmp_path / "a")
    with pytest.raises(UsageError, match="no run directory"):
        hr.rehearse(job(epochs=1), from_run=tmp_path / "nothing")
    idle = {"cluster": CLUSTER, "model": MODEL, "assumptions": hr.Assumptions(seed=7), "force": True}
    for name, value in idle.items():
        with pytest.raises(UsageError, match=rf"^{name}.*: for a simulated order of events, and from_run"):
            hr.rehearse(job(epochs=1), from_run=tmp_path / "a", **{name: value})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    plain = job(epochs=1, model=lambda: nn.Linear(8, 3))
    hr.fit(plain, hr.ParameterServer(workers=2), engine=hr.ThreadEngine(), run_dir=tmp_path, checkpoints=False)
    file = tmp_path / "events" / "rank-2.jsonl"
    events = [decode(line) for line in file.read_text().splitlines()]
    (order,) = (event for event in events if isinstance(event, PushesApplied))
    assert order.versions == tuple(range(2, 2 + len(order.leases)))

    def written(changed: PushesApplied) -> None:
        file.write_text("".join(f"{encode(changed if event is order else event)}\n" for event in events))

    turned = order.leases[::-1], order.workers[::-1]
    written(structs.replace(order, leases=turned[0], workers=turned[1]))
    with pytest.raises(DataError, match="contradicts itself"):
        hr.rehearse(plain, from_run=tmp_path)
    written(structs.replace(order, versions=tuple(version + 100 for version in order.versions)))
    with pytest.raises(UsageError, match="not all of one run"):
        hr.rehearse(plain, from_run=tmp_path)
    written(order)
    assert equal(model_of(hr.rehearse(plain, from_run=tmp_path).run.run_dir), model_of(tmp_path))
    with pytest.raises(UsageError, match="global_batch_size: 32 there and 16 here"):
        hr.rehearse(replace(plain, global_batch_size=16), from_run=tmp_path)
    with pytest.raises(UsageError, match="trained by parameter_server"):
        hr.rehearse(plain, "mirrored", from_run=tmp_path)


def test_a_rehearsal_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    with _threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


class Halving(hr.Callback):
    def on_step(self, moment: hr.Moment) -> None:
        moment.set_learning_rate_factor(0.5)


def test_callbacks_of_the_job_act_in_lock_step_and_are_refused_with_servers(tmp_path: Path) -> None:
    called = replace(job(1, model=functools.partial(nn.Linear, 8, 3)), callbacks=[Halving()])
    model = replace(MODEL, parameters=(ParameterSpec("weight", (3, 8)), ParameterSpec("bias", (3,))))
    hr.rehearse(called, hr.Mirrored(workers=2), CLUSTER, model=model, run_dir=tmp_path / "rehearsed")
    alone = hr.fit(called, hr.OneDevice(), device="cpu", run_dir=tmp_path / "alone", engine=ThreadEngine())
    for name, value in model_of(tmp_path / "rehearsed").items():
        torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match=r"callbacks \(Halving\)"):
        hr.rehearse(called, hr.Downpour(workers=2), CLUSTER, model=model)
