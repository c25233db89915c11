"""What is found before the start: planted cases must be found, and nothing is said of clean models."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace as hr
from api.probes.models import CLASSES, Cache, Codebook, Counting, Examples, Noisy, Target
from headrace.api.checks import inspect_job
from headrace.api.probes.finding import Finding, Scope
from headrace.api.probes.layers import modes_text
from headrace.api.probes.parts.sample import Sample
from headrace.api.probes.probing import PROBES, probe, said_by
from headrace.bench.library import declare_operators
from headrace.errors import JobError, UsageError
from headrace.machine.identity import detect
from headrace.models import zoo
from headrace.spec.model import ModelSpec
from headrace.strategies import Strategy
from headrace.training.user_code.trial import drawn, trial
from headrace.worker.session import objective_of
from strategies.contract_runs import CLUSTER, MODEL


def rows(*shape: int, count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, *shape, generator=generator)
    return inputs, torch.randint(0, CLASSES, (count,), generator=generator)


def found(model: Any, loss: Any = None, data: Any = None, **changes: Any) -> tuple[Finding, ...]:
    named = {"task": hr.tasks.multiclass(CLASSES)} if loss is None else {"loss": loss}
    job = hr.Job(
        **{
            "model": model,
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "data": rows(8) if data is None else data,
            "global_batch_size": 8,
            "steps": 1,
            **(named if "task" not in changes else {}),
            **changes,
        }
    )
    info = inspect_job(job)
    return probe(info.job, info.module, objective_of(info.job, info.module, info.weighed))


def of(findings: tuple[Finding, ...], scope: Scope) -> list[str]:
    return [finding.where for finding in findings if finding.scope is scope]


def linear() -> nn.Module:
    return nn.Linear(8, CLASSES)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def over_tokens(output: Tensor, target: Tensor) -> Tensor:
    labels = target.masked_fill(torch.arange(len(target)) % 5 < 3, -100)
    return F.cross_entropy(output, labels, ignore_index=-100)


def wrongly_weighed(output: Tensor, target: Tensor) -> hr.Mean:
    counted = target > 1
    return hr.Mean((F.cross_entropy(output, target, reduction="none") * counted).sum() / counted.sum(), len(target))


@pytest.mark.parametrize("loss", [contrastive, over_tokens, wrongly_weighed])
def test_a_loss_that_is_no_mean_over_examples_is_found(loss: Callable[..., Any]) -> None:
    (finding,) = found(linear, loss)
    assert (finding.scope, finding.where) == (Scope.SHARES, "the loss")
    assert "batch of 8 examples" in finding.what
    assert "hr.Mean" in finding.remedy


def test_a_metric_that_is_no_mean_over_examples_is_said_under_every_strategy() -> None:
    job = hr.Job(
        model=linear,
        task=hr.tasks.multiclass(CLASSES),
        metrics={
            "perplexity": lambda output, target: F.cross_entropy(output, target).exp(),
            "count": lambda output, target: (target == 1).sum(),
            "nats": F.cross_entropy,
            "of_ones": lambda output, target: hr.Mean(
                ((output.argmax(1) == 1) & (target == 1)).sum(), (target == 1).sum()
            ),
        },
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=rows(8),
        eval_data=rows(8),
        global_batch_size=8,
        steps=1,
    )
    for strategy in (hr.OneDevice(), hr.Mirrored(workers=2)):
        run = hr.fit(job, strategy, engine=hr.ThreadEngine())
        lines = [event.text for event in run.events if event.kind == "notice" and event.text.startswith("the metric")]
        assert [line.partition(":")[0] for line in lines] == ["the metric 'perplexity'", "the metric 'count'"]
        assert "of a batch of 8 examples is" in lines[0]
    run = hr.fit(job, check=False, engine=hr.ThreadEngine())
    assert not [event for event in run.events if event.kind == "notice" and event.text.startswith("the metric")]


@pytest.mark.parametrize(
    ("model", "scope", "where"),
    [
        (Codebook, Scope.SHARES, "'codes'"),
        (Examples, Scope.SHARES, "'count'"),
        (partial(Target, frozen=False), Scope.PIECES, "'target'"),
        (partial(Target, frozen=True), Scope.SHARES, "'target'"),
        (lambda: nn.utils.spectral_norm(linear()), Scope.PIECES, "'weight_u', 'weight_v'"),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(),
                                  linear()),
            Scope.SHARES,
            "'1.running_mean', '1.running_var'",
        ),
    ],
    ids=["codebook", "examples", "target", "frozen target", "spectral norm", "instance norm"],
)  # fmt: skip
def test_buffers_that_forward_changes_are_found(model: Callable[[], nn.Module], scope: Scope, where: str) -> None:
    # Which a loss in train mode may depend on, too.
    (finding,) = (each for each in found(model) if each.where != "the loss")
    assert (finding.scope, finding.where) == (scope, where)


def test_extra_state_that_forward_changes_is_found() -> None:
    (finding,) = found(lambda: nn.Sequential(Counting(lambda x: 1), nn.Identity()))
    assert (finding.scope, finding.where) == (Scope.PIECES, "'0'")
    assert "Pipeline(micro_batches=1)" in finding.remedy
    assert not found(lambda: Counting(lambda x: 0))


def test_extra_state_that_counts_examples_differs_on_shares() -> None:
    (finding,) = found(lambda: nn.Sequential(Counting(len), nn.Identity()))
    assert (finding.scope, finding.where) == (Scope.SHARES, "'0'")
    assert "sync_buffers='mean'" in finding.remedy


@pytest.mark.parametrize("stages", [hr.Pipeline(2, 2), hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, 1))])
def test_what_moves_once_a_micro_batch_is_said_where_there_are_several(stages: Strategy) -> None:
    plan = stages.plan(MODEL, CLUSTER)
    findings = found(lambda: nn.utils.spectral_norm(linear()))
    several = isinstance(stages, hr.Pipeline)
    assert bool(said_by(findings, plan, accumulate=1)) == several


def test_random_numbers_are_found() -> None:
    dropout = found(lambda: nn.Sequential(nn.Dropout(0.5), linear(), nn.Dropout(0.0)))
    assert of(dropout, Scope.EQUALITY) == ["'0'"]
    undecided, draws = found(Noisy)
    assert "not compared" in undecided.what
    assert (undecided.scope, draws.scope, draws.where) == (Scope.EQUALITY, Scope.EQUALITY, "the model")


def test_a_model_that_fails_on_part_of_a_batch_is_told() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(-1, 8)) if len(x) in (2, 8) else x[7]

    finding, *_ = found(lambda: Fixed(8, CLASSES))
    assert "fails on half of" in finding.what
    assert "IndexError" in finding.what


def test_a_loss_that_takes_no_single_example_is_compared_on_halves() -> None:
    def hardest(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, reduction="none").topk(2).values.mean()

    (finding,) = found(lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, CLASSES)), loss=hardest)
    assert "shares train with another loss" in finding.what


class Residual(nn.Module):
    """Convolutions with BatchNorm, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((x + self.block(x)).mean((2, 3)))
        return out


def norm(layer: type[nn.Module], **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), layer(16, **options), nn.ReLU(), nn.Linear(16, CLASSES))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (linear, (8,)),
        (lambda: zoo.mlp(8, 16, CLASSES), (8,)),
        (partial(norm, nn.BatchNorm1d), (8,)),
        (partial(norm, nn.BatchNorm1d, track_running_stats=False), (8,)),
        (partial(norm, nn.LayerNorm), (8,)),
        (lambda: norm(nn.BatchNorm1d).to(torch.float64), (8,)),
        (Residual, (3, 8, 8)),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, CLASSES))), (8,)),
        (Cache, (8,)),
        (lambda: nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES)), (8,)),
        (lambda: zoo.fashion_cnn(CLASSES), (1, 28, 28)),
    ],
    ids=[
        "linear",
        "mlp",
        "batch norm",
        "no statistics",
        "layer norm",
        "double",
        "residual",
        "script",
        "cache",
        "lazy",
        "cnn",
    ],
)
def test_nothing_is_said_of_clean_models(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    inputs, target = rows(*shape)
    double = any(parameter.dtype == torch.float64 for parameter in model().parameters())
    findings = found(model, data=(inputs.double() if double else inputs, target))
    assert [finding for finding in findings if finding.scope is not Scope.EQUALITY] == []


def test_half_precision_has_its_tolerance() -> None:
    inputs, target = rows(8)
    model = partial(lambda: norm(nn.LayerNorm).to(torch.bfloat16))
    assert found(model, data=(inputs.bfloat16(), target)) == ()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(1, 50, (16, 12), generator=torch.Generator().manual_seed(1))
    lengths = 3 + torch.arange(16) % 7
    padded = torch.arange(12) >= lengths[:, None]
    return {
        "input_ids": ids.masked_fill(padded, 0),
        "attention_mask": (~padded).long(),
        "labels": ids.masked_fill(padded, -100),
    }


def gpt2() -> nn.Module:
    declare_operators()
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.slow
def test_a_transformer_is_clean_if_its_loss_is_weighed_by_tokens() -> None:
    data = tokens()
    wrong = found(gpt2, data=data, task=hr.tasks.own_loss())
    assert of(wrong, Scope.SHARES) == ["the loss"]
    for task in (hr.tasks.own_loss(-100), hr.tasks.language_model()):
        assert of(found(gpt2, data=data, task=task), Scope.SHARES) == []


@pytest.mark.parametrize("each", PROBES)
@pytest.mark.parametrize("model", [Codebook, partial(Target, frozen=True), partial(norm, nn.BatchNorm1d)])
def test_a_probe_leaves_everything_as_it_was(each: Any, model: Callable[[], nn.Module]) -> None:
    module = model()
    next(iter(module.children())).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes, before_it = [part.training for part in module.modules()], drawn()
    job = hr.Job(model, lambda _: None, (), 1, loss=nn.CrossEntropyLoss(), steps=1)
    each(Sample(module, rows(8), objective_of(job, module)))
    assert [part.training for part in module.modules()] == modes
    assert drawn() == before_it
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("draw", [partial(torch.rand, 1), random.random, np.random.rand, np.random.randn])
def test_one_number_of_any_generator_is_seen(draw: Callable[[], object]) -> None:
    before = drawn()
    assert drawn() == before
    draw()
    assert drawn() != before


def test_a_trial_ends_after_an_error() -> None:
    module = Codebook()

    def fail() -> None:
        with trial(module):
            module.codes = torch.ones(3)
            module.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert module.training
    assert module.codes.shape == (8,)


def test_lazy_layers_get_their_shapes_in_the_launcher() -> None:
    job = hr.Job(
        model=lambda: nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(CLASSES)),
        task=hr.tasks.multiclass(CLASSES),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=rows(8),
        global_batch_size=8,
        steps=2,
    )
    assert "'0.weight', '0.bias', '1.weight' and 5 more" in inspect_job(job).notices[-1]
    runs = [hr.fit(job, strategy, engine=hr.ThreadEngine()) for strategy in (hr.OneDevice(), hr.CentralStorage(1))]
    one, other = (run.model.state_dict() for run in runs)
    assert one["0.weight"].shape == (16, 8)
    torch.testing.assert_close(one, other)


def test_sparse_gradients_made_by_a_function_are_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(3, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding((x.sum(1) > 0).long(), self.rows, sparse=True)

    with pytest.raises(JobError, match=r"sparse gradients of the parameter 'rows' .*use sparse=False"):
        found(Table)
    with pytest.raises(JobError, match=r"the parameter 'weight' is sparse .*make it dense"):
        found(sparse_weight)


def sparse_weight() -> nn.Module:
    layer = nn.Linear(8, CLASSES)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    return layer


def test_a_probe_of_a_small_model_is_quick() -> None:
    began = time.process_time()
    found(lambda: zoo.mlp(8, 16, CLASSES))
    assert time.process_time() - began < 0.5


def test_modes() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1), nn.ReLU()))
    assert modes_text(module, False) == ()
    module[1].eval()
    assert modes_text(module, False) == ("in eval mode during training, as the model has it: '1'",)
    assert "came in eval mode" in modes_text(module, True)[0]


def test_what_a_run_says() -> None:
    findings = tuple(Finding(scope.name, "x", "y", scope) for scope in Scope)
    model = ModelSpec(())
    cluster = detect("cpu", None)
    one, two = (strategy.plan(model, cluster) for strategy in (hr.OneDevice(), hr.Mirrored(2)))
    always = "x: EVALUATION; y", "x: START; y", "x: STATE; y"
    assert said_by(findings, one, 1) == always
    assert said_by(findings, two, 1) == ("x: SHARES; y", "x: WORKERS; y", "x: PROCESSES; y", *always)
    assert said_by(findings, one, 2) == ("x: SHARES; y", "x: PIECES; y", *always)
    refused = (Finding("what", "where", "remedy", Scope.WORKERS, refused=True),)
    assert said_by(refused, one, 1) == ()
    assert said_by(refused, two, 1, equals=False) == ("where: what; remedy",)
    with pytest.raises(UsageError, match="where: what; remedy"):
        said_by(refused, two, 1)
