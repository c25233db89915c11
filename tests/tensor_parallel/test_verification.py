"""What must stay whole does, and is named; what was chosen is tried before it is kept, on all ranks alike."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective
from headrace.errors import UsageError
from headrace.spec.job import Share
from headrace.strategies.tensor_parallel import TensorParallel
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.replica import RewrittenModel, SplitModel
from headrace.tensor_parallel.rewriting import split
from headrace.tensor_parallel.verification import GuardedCollective
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import WholeModel

Rules = str | dict[str, str]


class Coder(nn.Module):
    """A pair that can be split, `encoder` and `decoder`, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(self.between(self.encoder(x))))
        return y


class Mirror(Coder):
    """Decodes by the encoder's weight."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.linear(self.encoder(x), self.encoder.weight.t()))
        return y


class Rotated(Coder):
    """Multiplies by complex numbers, which wants contiguous values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.encoder(x).view(len(x), 3, 2)) * self.angles
        y: Tensor = self.head(self.decoder(torch.view_as_real(turned).flatten(1)))
        return y


class Halving(torch.autograd.Function):
    """Whose gradient looks at the number of features."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2 * gradient.shape[-1] / 6


def normed() -> nn.Module:
    model = Coder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.encoder)
    return model


def spectral() -> nn.Module:
    model = Coder()
    torch.nn.utils.spectral_norm(model.encoder)
    return model


def compiled() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    # What torch.compile(inner) makes of the module, but for the program.
    inner.forward = functools.partial(inner.forward)  # type: ignore[method-assign]
    inner.forward._torchdynamo_orig_callable = inner.forward  # type: ignore[attr-defined]
    return nn.Sequential(inner, nn.Linear(4, 6))


def parametrised() -> nn.Module:
    model = Coder()
    torch.nn.utils.parametrizations.weight_norm(model.encoder)
    return model


def hooked() -> nn.Module:
    model = Coder()
    model.encoder.register_forward_hook(lambda _, __, output: output / output.shape[-1])
    return model


def hooked_outside() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 4))
    model[0].register_forward_hook(lambda _, __, output: output / output.shape[-1])
    return model


def with_own_forward() -> nn.Module:
    model = Coder()
    whole = model.encoder.forward
    model.encoder.forward = lambda input: whole(input) / 6  # type: ignore[method-assign]
    return model


PARSES = threading.Lock()


def scripted() -> nn.Module:
    # Python 3.11 may raise a SystemError where two threads parse at the same time, as torch.jit does (CPython, 106905).
    with PARSES, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inner: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)))
    return nn.Sequential(inner, nn.Linear(4, 6))


HARD: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "read by the model": (Mirror, ("encoder",), "encoder: it has a parameter that the model reads itself"),
    "weight_norm": (normed, ("encoder",), "computes its weight of weight_g and weight_v"),
    "spectral_norm": (spectral, ("encoder",), "computes its weight of weight_orig"),
    "a parametrisation": (parametrised, ("encoder",), ""),
    "a hook": (hooked, ("encoder",), "encoder: it has hooks"),
    "a hook outside": (hooked_outside, (), ""),
    "a forward of its own": (with_own_forward, ("encoder",), "encoder: it has hooks, or a forward of its own"),
    "TorchScript": (scripted, ("0.0", "0.2"), ""),
    "a compiled module": (compiled, ("0.0", "0.2"), "0.0, 0.2: it is inside a compiled module"),
    "complex buffers": (Rotated, (), ""),
    "features that are counted": (
        lambda: Coder(lambda y: F.relu(y) / y.shape[-1]),
        ("decoder",),
        "left whole on every device: decoder: split, its output changes",
    ),
    "a gradient that is another": (lambda: Coder(Halving.apply), ("decoder",), "split, the gradient of 'encoder"),
    "a failing forward": (
        lambda: Coder(lambda y: y.mul(torch.ones(6, dtype=y.dtype)[: y.shape[-1] // 6 * 6])),
        (),
        "",
    ),
    "other numbers each time": (lambda: Coder(lambda y: y + next(NUMBERS)), ("encoder",), "something else each time"),
}
NUMBERS = iter(range(1000))


def tried(make: Callable[[], nn.Module], rules: Rules = "auto") -> list[tuple[RewrittenModel, nn.Module]]:
    torch.manual_seed(0)
    whole = make().double()
    whole_state, random = copy.deepcopy(whole.state_dict()), torch.get_rng_state()
    x = torch.randn(2, 4, dtype=torch.float64)

    def act(group: ThreadCollective) -> tuple[RewrittenModel, nn.Module]:
        torch.manual_seed(0)
        model = make().double()
        model.load_state_dict(whole_state)
        return split(model, rules, group, Trial(x)), model

    torch.set_rng_state(random)
    return together(2, act)


@pytest.mark.parametrize("name", sorted(HARD))
def test_what_cannot_be_split_stays_whole_and_the_rest_computes_the_same(name: str) -> None:
    make, stays, said = HARD[name]
    made = tried(make)
    (one, model), (other, _) = made
    assert one.kinds == other.kinds
    assert not set(stays) & one.kinds.keys()
    assert said in "\n".join(one.notices)
    assert all(part.training for part in model.modules())
    if name == "other numbers each time":
        return
    torch.manual_seed(0)
    whole, x = make().double(), torch.randn(5, 4, dtype=torch.float64)
    whole.load_state_dict(tensors_of(made))
    expected = whole.eval()(x)
    outputs: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        # The layers' own collectives meet, those of the threads that have split them.
        outputs[rank] = made[rank][1].eval()(x)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((outputs[rank] - expected).abs().max() < 1e-11 for rank in (0, 1))


def tensors_of(made: list[tuple[RewrittenModel, nn.Module]]) -> dict[str, Tensor]:
    """Returns the state of the whole model, of all parts."""
    whole = {}
    for name, tensor in made[0][1].state_dict(keep_vars=True).items():
        cut = made[0][0].cuts.get(name)
        parts = [model.state_dict()[name] for _, model in made]
        whole[name] = tensor.detach() if cut is None else cut.join(parts)
    return whole


@pytest.mark.parametrize(
    ("make", "rules", "words"),
    [
        (Mirror, {"encoder": "column"}, "'encoder' cannot be split by 'column': it has a parameter that the model"),
        (normed, {"enc*": "column"}, r"it computes its weight of weight_g and weight_v.*give it 'replicate'"),
        (hooked, {"*": "row"}, "'encoder' cannot be split by 'row': it has hooks"),
        (
            lambda: Coder(lambda y: F.relu(y) / y.shape[-1]),
            {"encoder": "column", "decoder": "row"},
            "rules split 'decoder', and then its output changes.*or use rules='auto'",
        ),
    ],
)
def test_rules_by_hand_that_would_change_the_model_are_refused(
    make: Callable[[], nn.Module], rules: Rules, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        tried(make, rules)


def test_rules_by_hand_for_what_cannot_be_tried_are_followed_and_that_is_said() -> None:
    made = tried(lambda: Coder(lambda y: y + next(NUMBERS)), {"encoder": "column"})
    assert made[0][0].kinds == {"encoder": "column"}
    assert made[0][0].notices == ("rules are followed without having been tried: it computes something else each time",)


def test_trying_a_model_leaves_it_and_random_numbers_as_they_were() -> None:
    class Counting(Coder):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(self.norm(x) + torch.rand(()) * 0)

    torch.manual_seed(5)
    model, x = Counting().double(), torch.randn(2, 4, dtype=torch.float64)
    state, buffers = torch.get_rng_state(), copy.deepcopy(dict(model.named_buffers()))
    hooks = len(model._forward_hooks) + len(model.encoder._forward_hooks)
    together(1, lambda group: split(model, "auto", group, Trial(x)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    assert model.training
    assert hooks == len(model._forward_hooks) + len(model.encoder._forward_hooks) == 0
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_the_launcher_knows_what_devices_will_leave_whole() -> None:
    torch.manual_seed(0)
    model, x = Mirror().double(), torch.randn(2, 4, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    cuts = TensorParallel(devices=2).cuts(model, 2, Trial(x))
    assert cuts == {name: cut.dim for name, cut in tried(Mirror)[0][0].cuts.items()}
    assert "encoder.weight" not in cuts
    assert "decoder.weight" in cuts
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    with pytest.raises(UsageError, match="'encoder' cannot be split by 'column'"):
        TensorParallel(devices=2, rules={"encoder": "column"}).cuts(model, 2, Trial(x))


def test_devices_with_other_examples_leave_all_whole_and_say_so() -> None:
    def act(group: ThreadCollective) -> tuple[dict[str, str], tuple[str, ...]]:
        torch.manual_seed(0)
        made = split(Coder().double(), "auto", group, Trial(torch.ones(2 + group.rank, 4, dtype=torch.float64)))
        return dict(made.kinds), made.notices

    for kinds, notices in together(2, act):
        assert kinds == {}
        assert notices == (
            "left whole on every device: the model: devices have other examples, or see it do other things",
        )


def test_a_rank_that_fails_or_ends_early_ends_the_others() -> None:
    """All know at once, and go on together."""

    def act(group: ThreadCollective) -> list[str]:
        def fails() -> str:
            if group.rank == 1:
                raise ValueError("3 is no shape")
            return sums(2)()

        def sums(times: int) -> Callable[[], str]:
            def run() -> str:
                for _ in range(times):
                    guard.all_reduce(torch.ones(1))
                return ""

            return run

        guard = GuardedCollective(group)
        said = [guard.attempt(fails), guard.attempt(sums(1 + group.rank)), guard.attempt(sums(2))]
        return [*said, str(group.sum([1.0])[0])]

    first, second = together(2, act)
    assert first == ["it fails on another device", "devices communicate differently often", "", "2.0"]
    assert second == ["it fails: ValueError: 3 is no shape", "it fails on another device", "", "2.0"]


def test_a_script_module_computes_whole() -> None:
    model = scripted()[0]
    x = torch.randn(2, 4)

    def act(group: ThreadCollective) -> Tensor | None:
        whole = copy.deepcopy(model)
        made = split(whole, "auto", group, Trial(x))
        assert not made.kinds
        share = Share((x, torch.zeros(2, 4)), 2, 2, 0)
        loss = SplitModel(WholeModel(whole, Objective(F.mse_loss)), made, group).run(share).loss
        return None if loss is None else torch.as_tensor(loss)

    loss, other = together(2, act)
    assert loss is not None
    assert other is None
    torch.testing.assert_close(loss, F.mse_loss(model(x), torch.zeros(2, 4)).detach())


@pytest.mark.slow
def test_nothing_of_the_trial_stays() -> None:
    width = 256
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    models = [model, copy.deepcopy(model)]
    gc.collect()
    before = _tensor_bytes()
    gc.disable()
    try:
        together(2, lambda group: split(models[group.rank], "auto", group, Trial(torch.ones(2, width))).notices)
        after = _tensor_bytes()
    finally:
        gc.enable()
    # Both have half of a model now, and each tried with gradients of a whole one. Of two threads that collect at the
    # same time one does nothing, so that what one of them tried may still be there.
    assert after < 1.02 * before


def _tensor_bytes() -> int:
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
    storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
