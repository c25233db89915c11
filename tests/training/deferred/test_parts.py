"""A model that is made in parts is the one that its constructor makes, bit for bit, or is built whole."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.training.deferred import parts
from headrace.training.deferred.lending import lending
from headrace.training.deferred.parts import Deferral, Parts, parts_of

SIZE = 48
Change = Callable[[nn.Sequential], object]


def _layers(change: Change) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Embedding(SIZE, SIZE, padding_idx=3))
        with torch.no_grad():
            change(module)
        return module

    return build


def _bounded(m: nn.Sequential) -> None:
    if m[0].weight.norm() > 1:
        m[0].weight.div_(m[0].weight.norm())


def _reads(m: nn.Sequential) -> None:
    m.scale = m[0].weight.abs().max().item()
    m[0].bias.fill_(m.scale)
    m[1].weight[0, 0] = m[0].weight[1, 1].item()


def _rows(m: nn.Sequential) -> None:
    m[0].weight[3:5].normal_()
    m[0].weight[torch.tensor([1, 2])] = 0
    m[0].weight[:, ::2].uniform_()
    m[0].weight[m[0].weight > 0.1] *= 2


def _own_generator(m: nn.Sequential) -> None:
    own = torch.Generator().manual_seed(5)
    m[0].weight.normal_(generator=own)
    m[1].weight.copy_(torch.randn(SIZE, SIZE, generator=own))


def _seeds(m: nn.Sequential) -> None:
    with torch.random.fork_rng(devices=[]):
        nn.init.normal_(m[0].weight)
    torch.manual_seed(3)
    nn.init.normal_(m[1].weight)


def _buffers(m: nn.Sequential) -> None:
    m.register_buffer("mask", torch.tril(torch.ones(SIZE, SIZE)))
    m.register_buffer("noise", torch.randn(SIZE, SIZE), persistent=False)


def _copies(m: nn.Sequential) -> None:
    m.append(copy.deepcopy(m[0]))
    m.append(nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, 4, SIZE), 2, enable_nested_tensor=False))


def _tied(m: nn.Sequential) -> None:
    m[0].weight = m[1].weight


def _cloned(m: nn.Sequential) -> None:
    m[0].weight = nn.Parameter(m[1].weight.clone())
    m[1].weight.mul_(2)


def _other_default(m: nn.Sequential) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    m.append(nn.Linear(SIZE, SIZE))
    torch.set_default_dtype(before)


def _numpy(m: nn.Sequential) -> None:
    draws = np.random.default_rng(3).normal(size=(SIZE, SIZE))
    m[0].weight.copy_(torch.from_numpy(draws))
    m[1].weight = nn.Parameter(torch.tensor(draws, dtype=torch.float32))


def _parametrized(m: nn.Sequential) -> None:
    nn.utils.parametrizations.orthogonal(m[0])
    nn.utils.parametrizations.spectral_norm(m[1])


def _frozen(m: nn.Sequential) -> None:
    m[0].requires_grad_(False)


PARTS: dict[str, Change] = {
    "plain": lambda m: None,
    "overwritten": lambda m: [nn.init.normal_(each.weight, std=0.02) for each in m],
    "truncated": lambda m: nn.init.trunc_normal_(m[0].weight, std=0.02),
    "cut hard": lambda m: nn.init.trunc_normal_(m[0].weight, std=1.0, a=-0.5, b=0.5),
    "orthogonal": lambda m: nn.init.orthogonal_(m[0].weight, 2.0),
    "sparse": lambda m: nn.init.sparse_(m[0].weight, 0.3),
    "masked": lambda m: m[0].weight.__setitem__(m[0].weight > 0.1, 0.0),
    "copied": lambda m: m[0].weight.copy_(m[1].weight),
    "loaded": lambda m: m[0].load_state_dict(m[1].state_dict()),
    "double": lambda m: m.double(),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
    "channels last": lambda m: m.append(nn.Conv2d(16, SIZE, 3).to(memory_format=torch.channels_last)),
    "recurrent": lambda m: m.append(nn.LSTM(SIZE, SIZE, 2)),
    "to the host": lambda m: m[0].weight.data.to("cpu").fill_(1),
    "sorted": lambda m: m[0].weight.copy_(m[0].weight.sort(dim=1).values),
    "bounded": _bounded,
    "reads": _reads,
    "rows": _rows,
    "own generator": _own_generator,
    "seeds": _seeds,
    "buffers": _buffers,
    "copies": _copies,
    "tied": _tied,
    "cloned": _cloned,
    "another default type": _other_default,
    "of numpy": _numpy,
    "frozen": _frozen,
    "scaled by a number of itself": lambda m: m[0].weight.mul_(0.5 / m[0].weight.std()),
    "kaiming": lambda m: nn.init.kaiming_normal_(m[0].weight, nonlinearity="relu"),
    "dirac and eye": lambda m: nn.init.eye_(m[0].weight),
    "dropped out": lambda m: nn.functional.dropout(m[0].weight, 0.5),
    "permuted": lambda m: m[0].weight.copy_(m[0].weight[torch.randperm(SIZE)]),
}


def _array(m: nn.Sequential) -> None:
    m[0].weight.numpy()[:] = 3


def _thread(m: nn.Sequential) -> None:
    thread = threading.Thread(target=lambda: nn.init.normal_(m[0].weight))
    thread.start()
    thread.join()


def _attribute(m: nn.Sequential) -> None:
    m.table = torch.randn(SIZE, SIZE)


def _shared(m: nn.Sequential) -> None:
    m[0].weight.data = m[1].weight.data


def _read_array(m: nn.Sequential) -> None:
    m[0].weight.data = torch.from_numpy(np.ones((SIZE, SIZE), np.float32))


def _on_meta(m: nn.Sequential) -> None:
    m[0].weight.copy_(torch.zeros(SIZE, SIZE, device="meta").shape[0] * torch.ones(SIZE, SIZE))


def _view(m: nn.Sequential) -> None:
    m.transposed = m[0].weight.t()


WHOLE: dict[str, tuple[Change, str]] = {
    "an array": (_array, "Tensor.numpy() of a large tensor"),
    "another thread": (_thread, "it starts a thread"),
    "an attribute": (_attribute, "neither parameters nor buffers"),
    "a view": (_view, "it keeps a view of a parameter, of shape (48, 48)"),
    "lazy": (lambda m: m.append(nn.LazyLinear(SIZE)), "layers get their shapes from the first batch"),
    "parametrized": (_parametrized, "set_ of a large tensor"),
    "shared memory": (_shared, "share memory without being one"),
    "from an array": (_read_array, "incompatible tensor type"),
    "on meta": (_on_meta, "it makes tensors on the meta device itself"),
    "resized": (lambda m: m[0].weight.data.resize_(SIZE, SIZE).fill_(1), "resize_ of a large tensor"),
    "set": (lambda m: m[0].weight.data.set_(m[1].weight.data), "set_ of a large tensor"),
    "other memory": (lambda m: m[0].weight.data.type(torch.FloatTensor).fill_(1), "aten._to_copy.default"),
    "mixed": (lambda m: torch._foreach_mul_([each.data for each in m.parameters()], 2.0), "_foreach_mul_"),
}


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers()])


def _fill(made: Parts, module: nn.Module) -> None:
    made.fill(module, list(made.views), lambda name, empty: made.value(name))


def _built(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> tuple[Deferral, int]:
    """Builds a model whole, and twice in parts as a launcher and a worker do; returns how, and what had no memory."""
    monkeypatch.setattr(parts, "LEAST_BYTES", 1024)
    torch.manual_seed(1)
    whole = build()
    drawn = torch.get_rng_state()
    deferral, count = Deferral(), 0
    for _ in range(2):
        torch.manual_seed(1)
        module = deferral.build(build)
        assert torch.equal(torch.get_rng_state(), drawn)
        if made := parts_of(module):
            count = len(made.views)
            assert all(dict(module.named_parameters())[name].is_meta for name in made.views)
            _fill(made, module)
        expected, found = _state(whole), _state(module)
        assert expected.keys() == found.keys()
        for name, each in expected.items():
            if is_lazy(each):
                continue
            assert torch.equal(each, found[name]), name
            assert each.requires_grad == found[name].requires_grad
            assert each.stride() == found[name].stride(), name
        assert len(list(whole.parameters())) == len(list(module.parameters()))
    return deferral, count


@pytest.mark.parametrize("case", PARTS)
def test_what_is_made_in_parts_is_what_the_constructor_makes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deferral, count = _built(_layers(PARTS[case]), monkeypatch)
    assert deferral.problem == ""
    assert count >= 2


@pytest.mark.parametrize("case", WHOLE)
def test_what_cannot_be_followed_is_built_whole_and_said(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, why = WHOLE[case]
    deferral, count = _built(_layers(change), monkeypatch)
    assert why in deferral.problem
    assert count == 0


def test_a_forward_without_gradients_gets_values_it_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1024)
    build = _layers(_copies)
    torch.manual_seed(1)
    whole = build()[0]
    torch.manual_seed(1)
    module = Deferral().build(build)
    made = parts_of(module)
    assert made is not None
    given = torch.randn(4, SIZE)
    with torch.no_grad(), lending(module):
        assert torch.equal(module[0](given), whole(given))
        assert module[0].weight.device == torch.device("cpu")
    assert module[0].weight.is_meta


def test_a_worker_that_does_otherwise_than_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_BYTES", 1024)
    deferral = Deferral()
    deferral.build(lambda: nn.Sequential(nn.Linear(SIZE, SIZE)))
    assert not deferral.problem
    with pytest.raises(parts.Unrecordable, match="where the launcher's recording has nothing"):
        deferral.build(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)))
