"""Rules for gradients where their contract does not look: bytes, codecs, options, rules of one's own, wrong ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.aggregation.gradients import WorkerGroup
from headrace.aggregation.sign_sgd import packed, unpacked
from headrace.aggregation.table import aggregation_of
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import HeadraceError, UnknownName, UsageError
from headrace.testing.references import WorkerCopies
from prediction.simulation.scenes import run as simulated
from strategies import references
from strategies.contract_models import COUNTS, VARIANTS, Case, Convolutional, dense, images
from strategies.contract_runs import distance, train
from strategies.test_contract import DOUBLE
from strategies.test_parameter_averaging import MOMENTUM

THREADS = hr.ThreadEngine()
MLP = Case(dense, optimizer=MOMENTUM)


def alone() -> WorkerGroup:
    group = ThreadCollective(ThreadGroup(1), 0)
    return WorkerGroup(group, group, torch.device("cpu"))


def sent_by(rule: hr.GradientAggregation, shapes: Sequence[Sequence[int]]) -> int:
    """Returns the bytes that a worker sends of float32 gradients of such shapes."""
    generator, workers = torch.Generator().manual_seed(0), alone()
    gradients = [torch.randn(*shape, generator=generator) for shape in shapes]
    state = [dict(rule.begin(torch.zeros_like(each), generator)) for each in gradients]
    rule.aggregate(gradients, state, workers)
    return workers.sent_bytes


CNN = [(64, 3, 5, 5), (64,), (256, 1600), (256,), (10, 256), (10,)]
ELEMENTS = sum(torch.Size(shape).numel() for shape in CNN)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_sends_as_many_bytes_as_the_paper_says(rank: int) -> None:
    # Vogels et al., 2019, section 3: r (n + m) of each matrix, and vectors as they are.
    matrices = [(64, 75), (256, 1600), (10, 256)]
    expected = 4 * (sum(rank * (n + m) for n, m in matrices) + 64 + 256 + 10)
    if rank == 4:
        assert all(rank * (n + m) < n * m for n, m in matrices)
    assert sent_by(hr.PowerSGD(rank), CNN) == expected


def test_top_k_sends_a_value_and_an_index_of_each_element() -> None:
    kept = [max(1, round(0.01 * torch.Size(shape).numel())) for shape in CNN]
    assert sent_by(hr.TopK(0.01), CNN) == 8 * sum(kept)


def test_signs_are_one_bit_each() -> None:
    assert sent_by(hr.SignSGD(), CNN) == sum(-(-torch.Size(shape).numel() // 8) for shape in CNN)
    assert sent_by(hr.SignSGD(), CNN) < 4 * ELEMENTS / 31.9


def test_int8_sends_a_byte_an_element_and_a_scale_of_256() -> None:
    blocks = sum(-(-torch.Size(shape).numel() // 256) for shape in CNN)
    assert sent_by(aggregation_of("int8"), CNN) == ELEMENTS + 4 * blocks


@pytest.mark.parametrize("elements", [1, 7, 8, 9, 1000])
def test_bits_come_back(elements: int) -> None:
    bits = torch.rand(elements, generator=torch.Generator().manual_seed(elements)) < 0.5
    assert packed(bits).shape == (-(-elements // 8),)
    assert torch.equal(unpacked(packed(bits), elements), bits)


def test_error_feedback_sends_everything_in_the_end() -> None:
    generator, total, sent = torch.Generator().manual_seed(1), torch.zeros(20, 30), torch.zeros(20, 30)
    for rule in (hr.PowerSGD(2), hr.TopK(0.1), aggregation_of("int8")):
        state = [dict(rule.begin(torch.zeros(20, 30), generator))]
        total.zero_(), sent.zero_()  # type: ignore[func-returns-value]
        for _ in range(50):
            gradient = torch.randn(20, 30, generator=generator)
            total += gradient
            (made,) = rule.aggregate([gradient.clone()], state, alone())
            sent += made
        assert torch.allclose(sent + state[0]["residual"], total, atol=1e-4)


@pytest.mark.parametrize("name", ["clipped-partial", "mean-cnn", "tokens"])
def test_a_plain_sum_is_one_device(name: str) -> None:
    job = VARIANTS[name].job(COUNTS["uneven"])
    assert distance(train(job, hr.Aggregated(3, by="plain")).tensors, train(job, hr.OneDevice()).tensors) <= DOUBLE


class Weighted(hr.WorkerMean):
    """The usual mean, by its weights."""

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return torch.stack([each * weight for each, weight in zip(values, weights, strict=True)]).sum(0)


class Unusual(nn.Module):
    """Its parameters: a transposed one, one in channels-last order, one of one element, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.convolution = nn.Conv2d(2, 6, 2).to(memory_format=torch.channels_last)
        self.one, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        images = inputs.view(-1, 1, 2, 2).expand(-1, 2, 2, 2)
        return self.convolution(images).flatten(1) * self.one + inputs @ self.transposed + self.none.sum()


def unusual(dtype: torch.dtype) -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    inputs, classes = torch.randn(24, 4, generator=generator), torch.randint(0, 6, (24,), generator=generator)
    torch.manual_seed(1)
    return hr.Job(
        model=Unusual().to(dtype),
        loss=nn.functional.cross_entropy,
        optimizer=MOMENTUM,
        data=(inputs.to(dtype), classes),
        global_batch_size=8,
        epochs=2,
    )


@pytest.mark.parametrize(
    "rule", ["plain", "top_k(share=1.0)", hr.TrimmedMean(), Weighted()], ids=["plain", "top_k", "trimmed", "weighted"]
)
def test_parameters_of_any_order_in_memory_and_size_have_their_sum(rule: str | hr.GradientAggregation) -> None:
    job = unusual(torch.float64)
    assert distance(train(job, hr.Aggregated(2, by=rule)).tensors, train(job, hr.OneDevice()).tensors) <= DOUBLE


@pytest.mark.parametrize("rule", ["power_sgd(rank=1)", "top_k(share=0.5)", "sign_sgd", "trimmed_mean", "int8"])
def test_a_model_of_16_bits_is_trained_by_every_rule(rule: str) -> None:
    job = unusual(torch.bfloat16)
    begin = {name: each.clone() for name, each in job.model.state_dict().items()}  # type: ignore[union-attr]
    assert 0 < distance(train(job, hr.Aggregated(2, by=rule)).tensors, begin) < 100


@pytest.mark.parametrize("options", [hr.Options(ema_decay=0.7), hr.Options(clip_norm=0.05), hr.Options(accumulate=2)])
def test_options_are_those_of_the_reference(options: hr.Options) -> None:
    job = dataclasses.replace(MLP.job(40), global_batch_size=8, options=options)
    run = hr.verify(job, hr.Aggregated(3, by=hr.TopK(0.3)), engine=THREADS, double=True)
    assert run.equal
    assert run.rows


def test_synchronised_batch_norm_of_a_plain_sum_is_mirrored() -> None:
    job = Case(Convolutional, images, options=hr.Options(batch_norm="sync")).job(COUNTS["even"])
    assert distance(train(job, hr.Aggregated(2, by="plain")).tensors, train(job, hr.Mirrored(2)).tensors) <= DOUBLE


def without_round(job: hr.Job, left_out: int) -> dict[str, Tensor]:
    """Trains by the reference of top-k on all rounds but one."""
    kept = WorkerCopies.rounds

    def rounds(copies: WorkerCopies) -> Iterator[Any]:
        return ((done, shares) for done, shares in kept(copies) if done != left_out + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerCopies, "rounds", rounds)
        return dict(references.aggregated(job, 2, references.top_k).tensors)


def test_a_round_that_is_left_out_leaves_the_state_as_it_was() -> None:
    def poison(worker: hr.Worker) -> None:
        for index, batch in enumerate(worker.batches()):
            inputs, target = batch
            if index == 1 and worker.rank == 1:
                inputs = inputs * torch.nan
            worker.step((inputs, target))

    job = dataclasses.replace(MLP.job(40), global_batch_size=8, options=hr.Options(on_nonfinite="skip"))
    run = hr.launch(poison, job, hr.Aggregated(2, by="top_k(share=0.2)"), engine=THREADS)
    assert all(bool(each.isfinite().all()) for each in run.model.state_dict().values())
    # As a loop that has never seen that round.
    expected = without_round(job, 1)
    assert distance(run.model.state_dict(), expected) <= DOUBLE


class SignsWithFeedback(hr.GradientAggregation):
    """Karimireddy et al., 2019, algorithm 1: signs times their mean magnitude, with what is lost added later."""

    own_state = ("residual",)

    def aggregate(self, gradients: Any, state: Any, workers: Any) -> list[Tensor]:
        sent = []
        for gradient, kept in zip(gradients, state, strict=True):
            wanted = gradient + kept["residual"]
            sent.append(wanted.abs().mean() * wanted.sign())
            kept["residual"] = wanted - sent[-1]
        return workers.sum(sent)


def test_a_rule_of_ones_own_is_its_loop(tmp_path: Path) -> None:
    def rule(gradients: list[Tensor], kept: list[dict[str, Tensor]], busy: list[int]) -> Tensor:
        total = torch.zeros_like(gradients[0])
        for gradient, state in zip(gradients, kept, strict=True):
            wanted = gradient + state.get("residual", 0.0)
            sent = wanted.abs().mean() * wanted.sign()
            state["residual"] = wanted - sent
            total += sent
        return total

    job = MLP.job(COUNTS["uneven"])
    outcome = train(job, hr.Aggregated(3, by=SignsWithFeedback()))
    assert distance(outcome.tensors, references.aggregated(job, 3, rule).tensors) <= 1e-12
    parts, strategy = tmp_path / "parts", hr.Aggregated(2, by=SignsWithFeedback())
    for epochs in (2, 4):
        longer = dataclasses.replace(MLP.job(COUNTS["even"]), epochs=epochs)
        resumed = hr.fit(longer, strategy, engine=THREADS, run_dir=parts, resume=epochs > 2)
    whole = hr.fit(longer, strategy, engine=THREADS)
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0


class Forgetful(SignsWithFeedback):
    own_state = ()

    def begin(self, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"residual": torch.zeros_like(like)}


class Fewer(hr.GradientAggregation):
    def aggregate(self, gradients: Any, state: Any, workers: Any) -> list[Tensor]:
        return workers.sum(gradients)[1:]


class Divides(hr.GradientAggregation):
    def aggregate(self, gradients: Any, state: Any, workers: Any) -> list[Tensor]:
        return [each / 0 for each in workers.sum(gradients)]


class Grows(SignsWithFeedback):
    def aggregate(self, gradients: Any, state: Any, workers: Any) -> list[Tensor]:
        for kept in state:
            kept["more"] = torch.zeros(1)
        return workers.sum(gradients)


class SharesNothing(SignsWithFeedback):
    own_state, common_state = (), ("residual",)


class Disagrees(hr.GradientAggregation):
    def aggregate(self, gradients: Any, state: Any, workers: Any) -> list[Tensor]:
        return [each * (1 + workers.rank) for each in workers.sum(gradients)]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Forgetful(), r"begin\(\) returned state of the names \['residual'\], and own_state and common_state say \[\]"),
        (Fewer(), r"Fewer.aggregate\(\) was given gradients of .* and returned"),
        (Divides(), "made gradients that are not finite of gradients that are"),
        (Grows(), "has changed the names or shapes of its state"),
        (Disagrees(), "after 1 round"),
        (
            SharesNothing(),
            r"'residual' is the same on all workers \(common_state\), and that of rank 1 is not rank 0's",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_rule_is_named(rule: hr.GradientAggregation, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=f"(?s){message}"):
        hr.fit(MLP.job(COUNTS["even"]), hr.Aggregated(2, by=rule), engine=THREADS, run_dir=tmp_path)


@pytest.mark.parametrize(
    ("by", "error", "message"),
    [
        ("power_sdg", UnknownName, "power_sgd"),
        ("top_k(shares=0.1)", UsageError, "by='top_k.shares=0.1.' cannot be made: .*shares"),
        ("int8(1)", UsageError, "the codec int8 has no options"),
        (3, UsageError, "by is a name"),
        ("power_sgd(rank=0)", UsageError, "rank must be a whole number of at least 1, got 0"),
        ("top_k(share=0)", UsageError, "share must be a number above 0 and at most 1, got 0"),
        ("sign_sgd(momentum=1)", UsageError, "momentum must be a number of at least 0 and below 1, got 1"),
        ("nothing.py:Mine", UsageError, "nothing"),
    ],
)
def test_a_rule_that_there_is_not_is_refused(by: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hr.Aggregated(2, by=by)


def test_half_precision_with_a_scale_is_refused() -> None:
    job = dataclasses.replace(MLP.job(COUNTS["even"], torch.float32), options=hr.Options(precision="fp16"))
    with pytest.raises(UsageError, match="multiplies gradients by a scale that changes"):
        hr.fit(job, hr.Aggregated(2), engine=THREADS)


def test_what_depends_on_shapes_is_not_simulated_and_the_rest_is() -> None:
    assert "depends on the shapes" in hr.Aggregated(2).behave(2).not_simulated
    assert hr.Aggregated(8, by="sign_sgd").behave(8).exchange.sent == 8 / 64  # type: ignore[union-attr]
    assert hr.Aggregated(2, by="top_k(share=0.01)").behave(2).not_simulated == ""
    assert simulated(hr.Aggregated(4, by="sign_sgd")).step_s < simulated(hr.Aggregated(4, by="plain")).step_s


def test_power_sgd_learns_what_one_device_learns() -> None:
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(3))
    data = (inputs, (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = hr.Job(model=model, loss=nn.functional.cross_entropy, optimizer=sgd, data=data, eval_data=data,
                 global_batch_size=32, epochs=10)  # fmt: skip
    one, low = (hr.fit(job, each, engine=THREADS).metrics["loss"] for each in ("one_device", hr.Aggregated(2)))
    assert abs(low - one) < 0.1 < 0.4 < float(torch.log(torch.tensor(2.0)))
