"""FullySharded of a model that no process builds whole: the numbers of one device, also after a resume."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace as hr
from headrace.errors import JobError, UsageError

WIDTH, TOKENS = 256, 600


class Stack(nn.Module):
    """Embeddings, encoder layers of which all but the first are copies, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.trunc_normal_(self.tokens.weight, std=0.02)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(self.tokens(tokens)))
        return found


class Recurrent(Stack):
    """Its layer asks where its parameters are before it calls an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.encoder(self.tokens(tokens))[0])
        return found


class Kept(Stack):
    """Keeps a large tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.randn(TOKENS, 2 * WIDTH, dtype=torch.float64)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def job_of(model: type[nn.Module], steps: int = 3) -> hr.Job:
    tokens = torch.randint(0, TOKENS, (24, 8), generator=torch.Generator().manual_seed(0))
    return hr.Job(
        model=model, loss=loss, optimizer=adam, data=(tokens, tokens), global_batch_size=8, steps=steps, seed=3
    )


def _apart(run: hr.Run, other: hr.Run) -> float:
    one, two = run.model.state_dict(), other.model.state_dict()
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [None, hr.Mirrored(2)])
def test_a_model_made_in_parts_trains_as_on_one_device(
    outer: hr.Strategy | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sharded = hr.FullySharded(2, deferred=True)
    strategy = hr.Hybrid(outer, sharded) if outer else sharded
    job = job_of(Stack)
    alone = hr.fit(job, device="cpu")
    hr.fit(replace(job, steps=2), strategy, device="cpu", run_dir=tmp_path)
    assert "bytes of parameters are made one by one" in capsys.readouterr().err
    # The values are those of the checkpoint, and not of the constructor.
    resumed = hr.fit(job, strategy, device="cpu", run_dir=tmp_path, resume=True)
    assert _apart(alone, resumed) <= 1e-9


@pytest.mark.slow
def test_a_model_made_in_parts_begins_with_stored_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        values = Stack().state_dict()
    del values["head.weight"]
    save_file(values, tmp_path / "model.safetensors")
    job = replace(job_of(Stack), weights=tmp_path)
    sharded = hr.fit(job, hr.FullySharded(2, deferred=True), device="cpu")
    assert "bytes of parameters are made one by one" in capsys.readouterr().err
    assert _apart(hr.fit(job, device="cpu"), sharded) <= 1e-9


@pytest.mark.slow
def test_a_model_that_cannot_be_made_in_parts_is_built_whole(capsys: pytest.CaptureFixture[str]) -> None:
    run = hr.fit(job_of(Kept, 1), hr.FullySharded(2, deferred=True), device="cpu")
    assert "each process builds the whole model" in capsys.readouterr().err
    assert _apart(hr.fit(job_of(Kept, 1), device="cpu"), run) <= 1e-9


def test_what_needs_all_parameters_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="deferred must be True or False, got 1"):
        hr.FullySharded(deferred=1)  # type: ignore[arg-type]


class Writing(Stack):
    """Writes to a parameter in forward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.encoder.layers[0].linear1.weight.mul_(1)
        return super().forward(tokens)


class Showing(Stack):
    """Reads a parameter where no operation is seen."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.encoder.layers[0].linear1.weight.detach().numpy()
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Writing, "forward writes to the parameter 'encoder.layers.0.linear1.weight'"), (Showing, "it calls numpy()")],
)
def test_a_forward_that_needs_memory_of_parameters_is_refused(model: type[nn.Module], why: str) -> None:
    with pytest.raises(JobError, match=re.escape(why)):
        hr.fit(job_of(model), hr.FullySharded(2, deferred=True), device="cpu")


@pytest.mark.slow
def test_a_recurrent_layer_is_made_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    run = hr.fit(job_of(Recurrent), hr.FullySharded(2, deferred=True), device="cpu")
    assert "bytes of parameters are made one by one" in capsys.readouterr().err
    assert _apart(hr.fit(job_of(Recurrent), device="cpu"), run) <= 1e-9
