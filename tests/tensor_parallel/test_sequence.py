"""Values between split blocks are divided along the sequence, and training is as on one device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace as hr
from collectives.seats import together
from headrace import internals
from headrace.collectives.threads import ThreadCollective
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.rewriting import split
from headrace.trees import tensors_of
from strategies.contract_runs import distance, train

WORDS, WIDTH, HEADS = 13, 8, 2
ADAM = partial(torch.optim.Adam, lr=0.01)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = (each(x).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return out


class Layer(nn.Module):
    """A layer of a transformer, with its block of dense layers in itself."""

    def __init__(self, drop: Callable[[Tensor], Tensor] | None = None, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.drop, self.again = drop or nn.Identity(), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)))
        return x * self.scale + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, **how: Any) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Layer(**how) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout, batch_first=batch_first)
        self.words, self.body = nn.Embedding(WORDS, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.turned = nn.Linear(WIDTH, WORDS), not batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.body(x.transpose(0, 1)).transpose(0, 1) if self.turned else self.body(x)
        y: Tensor = self.head(x)
        return y


def job(model: nn.Module, tokens: int = 7, **changes: Any) -> hr.Job:
    text = torch.randint(0, WORDS, (8, tokens), generator=torch.Generator().manual_seed(2))
    return hr.Job(
        model=model.double(),
        task=hr.tasks.language_model(),
        optimizer=ADAM,
        data=(text, text),
        eval_data=(text[:3], text[:3]),
        global_batch_size=4,
        epochs=1,
        seed=3,
        **changes,
    )


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "encoder": partial(Encoder, batch_first=True),
    "encoder, tokens first": partial(Encoder, batch_first=False),
    "checkpoints": partial(Decoder, again=True),
}
STRATEGIES: dict[str, Callable[[], hr.Strategy]] = {
    "slices": lambda: hr.TensorParallel(2, sequence=True),
    "replicas": lambda: hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2, sequence=True)),
    "sharded": lambda: hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2, sequence=True)),
}


def assert_as_one_device(strategy: hr.Strategy, job: hr.Job, engine: Any = None) -> None:
    right, found = train(job, hr.OneDevice()), train(job, strategy, engine) if engine else train(job, strategy)
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)
    assert found.metrics == pytest.approx(right.metrics, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 6, 7])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_any_number_of_tokens_is_as_on_one_device(model: str, tokens: int) -> None:
    assert_as_one_device(hr.TensorParallel(2, sequence=True), job(made(MODELS[model]), max(2, tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicas", "sharded"])
def test_hybrids_are_as_one_device(strategy: str) -> None:
    assert_as_one_device(STRATEGIES[strategy](), job(made(Decoder)))


@pytest.mark.slow
def test_dropout_is_that_of_whole_values() -> None:
    one = job(made(partial(Encoder, True, 0.3)))
    with LocalEngine() as engine:
        right, found = train(one, hr.TensorParallel(2), engine), train(one, STRATEGIES["slices"](), engine)
    assert distance(found.tensors, right.tensors) <= 1e-9
    assert found.losses == pytest.approx(right.losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_models_of_transformers_are_as_one_device(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    shape |= {"use_cache": False, "max_position_embeddings": 16}
    if name == "Llama":
        shape |= {"intermediate_size": 12}
    else:
        shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = getattr(transformers, f"{name}Config")(**shape)
    kind = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    assert_as_one_device(STRATEGIES["slices"](), job(made(lambda: kind(config))))


class Alive(internals.TorchDispatchMode):
    """Counts the bytes of the storages that are made meanwhile and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.known = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of(output):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self.leave, storage.data_ptr(), storage.nbytes())
        return output

    def leave(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def kept_bytes(sequence: bool, tokens: int) -> int:
    """Returns what a rank keeps of a forward for its backward, and the output."""

    def rank(group: ThreadCollective) -> int:
        model = copies[group.rank]
        split(model, "auto", group, Trial(words[:, :4]), sequence)
        x = model.words(words).detach().requires_grad_()
        with Alive() as alive:
            alive.known |= {each.untyped_storage().data_ptr() for each in (x, *model.parameters())}
            for layer in model.layers:
                x = layer(x)
            return alive.now

    words = torch.randint(0, WORDS, (2, tokens), generator=torch.Generator().manual_seed(2))
    whole = made(partial(Decoder, 4)).double()
    copies = [copy.deepcopy(whole) for _ in range(2)]
    return max(together(2, rank))


def test_what_is_kept_between_blocks_is_divided() -> None:
    plain, divided = kept_bytes(False, 64), kept_bytes(True, 64)
    # Of a layer: four inputs of blocks and norms, and what is inside of blocks, which slices have halved before.
    assert divided <= 0.78 * plain


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Mixed(Decoder):
    """Its layers look at other tokens."""

    def __init__(self) -> None:
        super().__init__(drop=Shift())


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(Decoder, drop=Functional()), r"dropout between the split blocks of 'layers\.0' draws random numbers"),
        (Mixed, r"divides values between the blocks of 'layers\.0', and then (the gradient|its output)"),
        (lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)), "the model has no such list"),
    ],
)
def test_what_cannot_be_divided_is_refused(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        train(job(made(model)), STRATEGIES["slices"]())


class Skipping(Decoder):
    """Leaves out a layer where a token says so."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for place, layer in enumerate(self.layers):
            x = x if place == self.which and tokens.shape[1] == 7 else layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


@pytest.mark.parametrize(("which", "words"), [(0, r"'layers\.1' is given \(1, 7, 8\)"), (1, "was not called")])
def test_layers_that_are_left_out_later_are_refused(which: int, words: str) -> None:
    def rank(group: ThreadCollective) -> None:
        model = copies[group.rank]
        split(model, "auto", group, Trial(tokens[:, :14]), sequence=True)
        model(tokens)
        # As many as a rank has had of those before.
        model(tokens[:1, :7])

    tokens = torch.randint(0, WORDS, (2, 14), generator=torch.Generator().manual_seed(2))
    whole = made(partial(Skipping, which)).double()
    copies = [copy.deepcopy(whole) for _ in range(2)]
    with pytest.raises(UsageError, match=words):
        together(2, rank)


def test_a_pipeline_around_it_is_refused() -> None:
    with pytest.raises(UsageError, match=r"where hr\.Pipeline\(\.\.\.\) cuts"):
        hr.Hybrid(hr.Pipeline(2), hr.TensorParallel(2, sequence=True))
