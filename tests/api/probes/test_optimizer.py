"""What the probe finds out about optimizers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headrace.api.probes.optimizers import probe
from headrace.api.probes.optimizers.known import known_kept
from headrace.api.probes.optimizers.probe import OptimizerFindings, probe_optimizer
from headrace.api.probes.optimizers.schedules import check_schedule
from headrace.errors import UsageError
from headrace.spec.options import Options
from training.block_state import Blockwise, BlockwiseNameless, RoundsAtRandom
from training.odd_optimizers import (
    Anchored,
    Averaging,
    Counting,
    CountingByGroup,
    Keeping,
    Limited,
    Noisy,
    OfGroup,
    OfParameter,
    Referring,
    Remembering,
    SlowCopies,
    Written,
    bounded,
    careless,
    clamp,
    clip,
    hooked,
    looking_ahead,
    of_tensors,
)
from training.test_optimizer import ELEMENTWISE, MATRIXWISE

optim = torch.optim


def named() -> list[tuple[str, Tensor]]:
    return list(nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False)).named_parameters())


def found(factory: Callable[..., Any]) -> OptimizerFindings:
    return probe_optimizer(factory, named())


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_these_treat_every_element_alone(name: str) -> None:
    findings = found(ELEMENTWISE[name])
    assert findings.sliceable
    assert findings.needs == OptimizerFindings().needs


@pytest.mark.parametrize("name", sorted(MATRIXWISE))
def test_these_need_whole_matrices(name: str) -> None:
    findings = found(MATRIXWISE[name])
    assert not findings.sliceable
    assert findings.needs == OptimizerFindings().needs


@pytest.mark.parametrize(
    ("factory", "sliceable", "coupled", "at_once"),
    [
        pytest.param(of_tensors(Written), True, "", False, id="written out"),
        pytest.param(of_tensors(partial(Written, boost=5.0)), True, "", False, id="an attribute"),
        pytest.param(of_tensors(Keeping), True, "", False, id="collections"),
        pytest.param(of_tensors(OfParameter), False, "", False, id="a parameter's length"),
        pytest.param(of_tensors(Counting), True, "", True, id="counts in an attribute"),
        pytest.param(of_tensors(CountingByGroup), True, "", True, id="counts in a group"),
        pytest.param(OfGroup, False, "OfGroup looks at several parameters together", True, id="a group's length"),
        pytest.param(Limited, False, "Limited looks at several parameters together", True, id="a limit"),
        pytest.param(hooked(clamp), True, "", False, id="a hook on each"),
        pytest.param(bounded, True, "", True, id="a limit on weights after a step"),
        pytest.param(hooked(careless), True, "", True, id="a hook that expects gradients"),
        pytest.param(hooked(clip), False, "SGD looks at several parameters together", True, id="a hook on all"),
        pytest.param(looking_ahead, True, "", True, id="a wrapper"),
    ],
)
def test_what_an_optimizer_looks_at(factory: Any, sliceable: bool, coupled: str, at_once: bool) -> None:
    findings = found(factory)
    assert findings.sliceable is sliceable
    assert findings.needs.coupled.startswith(coupled)
    assert bool(findings.needs.coupled) is bool(coupled)
    assert findings.needs.at_once is at_once
    assert not findings.needs.unsaved


@pytest.mark.parametrize("scaled", [[False, False], [True, False], [False, True]])
def test_every_group_is_tried(scaled: list[bool]) -> None:
    class Either(OfParameter):
        def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
            of = next(each for each in self.param_groups if any(tensor is one for one in each["params"]))
            return super().scale(moved, tensor) if of["scaled"] else 1.0

    def factory(pairs: Any) -> optim.Optimizer:
        return Either([{"params": [t], "scaled": s} for (_, t), s in zip(pairs, scaled, strict=True)])

    assert found(factory).sliceable is not any(scaled)


def test_a_group_may_be_empty() -> None:
    findings = found(lambda pairs: optim.SGD([{"params": []}, {"params": [t for _, t in pairs]}], lr=0.1))
    assert findings.sliceable


def test_a_matrix_longer_than_128_is_tried_as_one() -> None:
    class Factoring(OfParameter):
        def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
            return super().scale(moved, tensor) if tensor.dim() == 2 and min(tensor.shape) > 128 else 1.0

    assert found(Factoring).sliceable
    large = [("large", nn.Parameter(torch.zeros(260, 200)))]
    assert not probe_optimizer(Factoring, large).sliceable


@pytest.mark.parametrize(
    ("least", "shape"),
    [
        pytest.param(8, (8, 6), id="small"),
        pytest.param(4096, (200, 512), id="larger than what is tried, in whole blocks"),
        pytest.param(4096, (20_000,), id="a vector"),
        pytest.param(10**9, (40_000, 30_000), id="no trial can hold it"),
    ],
)
def test_state_in_blocks_is_not_cut_and_its_checkpoints_are_exact(least: int, shape: tuple[int, ...]) -> None:
    large = [("large", probe.stand_in(shape, torch.float32, torch.device("cpu")))]
    findings = probe_optimizer(partial(Blockwise, least=least), large)
    assert not findings.sliceable
    assert findings.needs == OptimizerFindings().needs
    assert probe_optimizer(partial(Blockwise, least=10**10), large).sliceable


def test_blocks_that_no_checkpoint_can_hold() -> None:
    for shape in ((8, 6), (40_000, 30_000)):
        large = [("large", probe.stand_in(shape, torch.float32, torch.device("cpu")))]
        unsaved = probe_optimizer(partial(BlockwiseNameless, least=48), large).needs.unsaved
        assert unsaved.startswith("BlockwiseNameless keeps a Nameless, which torch.serialization.add_safe_globals does")


@pytest.mark.parametrize(("dtype", "random"), [(torch.bfloat16, True), (torch.float32, False)])
def test_rounding_by_chance_in_the_parameters_own_type(dtype: torch.dtype, random: bool) -> None:
    findings = probe_optimizer(RoundsAtRandom, list(nn.Linear(3, 2).to(dtype).named_parameters()))
    assert findings.needs.random is random
    assert bool(findings.needs.coupled) is random


def test_groups_by_size_are_tried_as_they_are() -> None:
    def factory(pairs: Any) -> optim.Optimizer:
        tensors = [tensor for _, tensor in pairs]
        large = [tensor for tensor in tensors if tensor.numel() > 50_000]
        return OfParameter([{"params": large}, {"params": [each for each in tensors if each.numel() <= 50_000]}])

    assert not probe_optimizer(factory, [*named(), ("large", nn.Parameter(torch.zeros(260, 200)))]).sliceable


def test_random_numbers_in_a_step() -> None:
    needs = found(Noisy).needs
    assert needs.random
    assert needs.coupled == "Noisy.step() draws random numbers"


def test_state_that_is_made_from_values() -> None:
    assert found(Anchored).needs.values
    assert not found(optim.Adagrad).needs.values


class Perpendicular(OfParameter):
    """Looks at a parameter's length where the gradient is at right angles to it alone, as AdamP does."""

    def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
        assert tensor.grad is not None
        across = float(torch.cosine_similarity(tensor.flatten(), tensor.grad.flatten(), dim=0).abs()) < 1e-6
        return super().scale(moved, tensor) if across else 1.0


def test_a_gradient_at_right_angles_is_tried() -> None:
    assert not found(Perpendicular).sliceable


def test_a_step_that_needs_every_gradient() -> None:
    assert found(hooked(careless)).needs.gradients
    assert not found(hooked(clamp)).needs.gradients


def test_a_train_and_an_eval_mode() -> None:
    findings = found(Averaging)
    assert findings.needs.modes
    assert findings.sliceable


def test_what_no_checkpoint_holds() -> None:
    assert found(Remembering).needs.unsaved.startswith("Remembering keeps something outside its groups")


def deep(width: int) -> list[tuple[str, Tensor]]:
    return list(nn.Sequential(*(nn.Linear(width, width) for _ in range(5))).named_parameters())


@pytest.mark.parametrize("every", [3, 5])
def test_copies_that_a_constructor_makes_are_tried_and_kept(every: int) -> None:
    small, large = (probe_optimizer(partial(SlowCopies, every=every), deep(width)) for width in (4, 40))
    assert small.needs.coupled.startswith("SlowCopies looks at several parameters together")
    assert (small.needs.unsaved, large.needs.unsaved[:60]) == (
        "",
        "SlowCopies keeps something outside its groups, its state of ",
    )


def test_parameters_in_a_list_of_ones_own_stay_the_same() -> None:
    assert found(Referring).needs.unsaved == ""


def test_objects_in_the_state_of_a_parameter() -> None:
    class Strange(Written):
        def scale(self, moved: list[Tensor], tensor: Tensor) -> float:
            self.state[tensor]["seen"] = {1, 2}
            return 1.0

    assert found(Strange).needs.unsaved.startswith("Strange keeps a set as 'seen' of '0.weight', which no checkpoint")


@pytest.mark.parametrize("error", [TypeError, ValueError, AssertionError])
def test_an_optimizer_that_wants_a_closure_is_refused(error: type[Exception]) -> None:
    class Wanting(Written):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if closure is None:
                raise error("where is the closure?")

    with pytest.raises(UsageError, match=r"Wanting.step\(\) cannot be called by itself: \w+: where is .* a closure"):
        found(Wanting)


def test_lbfgs_is_sandblasters() -> None:
    with pytest.raises(UsageError, match=r"LBFGS.step\(\) evaluates .* in a closure, .*hr.Sandblaster"):
        found(optim.LBFGS)


def test_one_that_cannot_be_tried_is_not_divided() -> None:
    findings = found(partial(optim.SparseAdam, lr=0.1))
    assert not findings.sliceable
    assert findings.needs.coupled.startswith("SparseAdam.step() could not be tried: RuntimeError: SparseAdam does not")


def test_asking_leaves_the_model_alone() -> None:
    pairs = named()
    before = [tensor.detach().clone() for _, tensor in pairs]
    probe_optimizer(optim.Adam, pairs)
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(pairs, before, strict=True))
    assert all(tensor.grad is None for _, tensor in pairs)


@pytest.mark.parametrize(
    ("factory", "kept"),
    [
        (partial(optim.SGD, lr=0.1), 0),
        (partial(optim.SGD, lr=0.1, momentum=0.9), 1),
        (optim.RMSprop, 1),
        (optim.Adam, 2),
        (partial(optim.AdamW, amsgrad=True), 3),
        (partial(optim.Adafactor, lr=0.1), 0),
        (Keeping, 2),
    ],
)
def test_how_often_an_optimizer_keeps_a_parameter(factory: Any, kept: int) -> None:
    assert found(factory).kept == kept


def test_of_several_groups_the_one_that_keeps_most_counts() -> None:
    def mixed(parameters: Any) -> optim.Optimizer:
        first, *others = parameters
        return optim.SGD([{"params": [first], "momentum": 0.9}, {"params": others}], lr=0.1)

    assert found(mixed).kept == 1


KNOWN = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": optim.Adam,
    "amsgrad": partial(optim.AdamW, amsgrad=True, betas=(0.8, 0.9)),
    "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": partial(optim.Adamax, maximize=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_optimizer_of_torch_that_is_known_is_as_a_trial_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = found(KNOWN[name])
    tried: list[object] = []
    monkeypatch.setattr(probe, "known_kept", lambda *_: tried.append(name))
    assert found(KNOWN[name]) == known
    assert tried == [name]


class Doubling(optim.SGD):
    pass


@pytest.mark.parametrize(
    "factory",
    [
        Doubling,
        lambda named: optim.SGD(named),
        partial(optim.SGD, lr=torch.tensor(0.1)),
        partial(optim.SGD, foreach=True),
        optim.Adafactor,
        hooked(clip),
    ],
    ids=["a subclass", "a function", "a tensor", "foreach", "another one", "hooks"],
)
def test_what_is_not_known_is_tried(factory: Any) -> None:
    assert known_kept(factory, (tensor for _, tensor in named())) is None


def test_a_step_that_is_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    before = optim.SGD.step

    @wraps(before)
    def clipped(self: optim.SGD, closure: None = None) -> None:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        before(self, closure)

    monkeypatch.setattr(optim.SGD, "step", clipped)
    assert "SGD looks at several parameters together" in found(partial(optim.SGD, lr=0.1)).needs.coupled


def test_a_hook_of_all_optimizers_is_tried() -> None:
    handle = register_optimizer_step_pre_hook(clip)
    try:
        assert found(partial(optim.SGD, lr=0.1)).needs.coupled
    finally:
        handle.remove()


def _rate(how: str, step: int) -> float:
    if step < 3:
        return 1.0
    return {"torch": lambda: float(torch.rand(())), "random": random.random, "clock": time.perf_counter}[how]()


@pytest.mark.parametrize("how", ["torch", "random", "clock"])
def test_a_schedule_that_is_no_function_of_the_step_is_refused(how: str) -> None:
    options = Options(schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, how)))
    named = [("weight", nn.Parameter(torch.ones(2)))]
    with pytest.raises(UsageError, match=r"other learning rates when it is made again .* in step 3\): it draws random"):
        check_schedule(options, partial(torch.optim.SGD, lr=0.1), named)


def test_a_schedule_may_draw_from_a_generator_that_it_makes() -> None:
    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        drawn = random.Random(1)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: drawn.random())

    check_schedule(Options(schedule=make), partial(torch.optim.SGD, lr=0.1), [("weight", nn.Parameter(torch.ones(2)))])
