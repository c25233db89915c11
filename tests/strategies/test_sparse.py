"""Embeddings with `sparse=True`: the same rows under every strategy that trains them, from servers or not."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.checkpoint import folder
from headrace.checkpoint.spool import Spool
from headrace.errors import DataError, InfeasiblePlan, JobError, UsageError
from headrace.report.views.table import run_rows
from headrace.spec.events import Event, Notice, ServerStarted, Stepped

ROWS, EXAMPLES = 300, 96


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 4, sparse=True, padding_idx=0)
        self.seen = nn.EmbeddingBag(50, 3, sparse=True, mode="mean")
        nn.init.xavier_uniform_(self.seen.weight)
        self.tower = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tower(torch.cat([self.item(x[:, 0]), self.seen(x[:, 1:] % 50)], 1))
        return output.squeeze(1)


def job(optimizer: Callable[..., Any], epochs: int = 2, **options: Any) -> hr.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, ROWS, (EXAMPLES, 4), generator=generator)
    y = torch.randn(EXAMPLES, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=TwoTables,
        optimizer=optimizer,
        data=(x, y),
        eval_data=(x, y),
        loss=nn.functional.mse_loss,
        global_batch_size=13,
        epochs=epochs,
        seed=7,
        options=hr.Options(**options),
    )


def weights(run: hr.Run) -> Tensor:
    """Returns every number of the trained model."""
    return torch.cat([each.flatten() for each in run.model.parameters()]).detach()


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.3),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.3),
    "rowwise": functools.partial(hr.RowwiseAdagrad, lr=0.3),
    "adam": functools.partial(hr.LazyAdam, lr=0.05),
}
SYNCHRONOUS = {
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(3),
    "servers": hr.ParameterServer(workers=2, servers=3, staleness_bound=0),
    "ranges": hr.ParameterServer(workers=3, servers=2, staleness_bound=0, row_placement="range", transport="tcp"),
}
THREADS = hr.ThreadEngine


@functools.cache
def one_device(optimizer: str, epochs: int = 2) -> tuple[Tensor, float]:
    run = hr.fit(job(OPTIMIZERS[optimizer], epochs), hr.OneDevice(), device="cpu", engine=THREADS())
    return weights(run), run.metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", *(pytest.param(each, marks=pytest.mark.full) for each in OPTIMIZERS)])
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_synchronous_strategies_give_what_one_device_gives(strategy: str, optimizer: str) -> None:
    run = hr.fit(job(OPTIMIZERS[optimizer]), SYNCHRONOUS[strategy], device="cpu", engine=THREADS())
    expected, loss = one_device(optimizer)
    torch.testing.assert_close(weights(run), expected, rtol=1e-9, atol=1e-9)
    assert run.metrics["loss"] == pytest.approx(loss, rel=1e-9)
    assert torch.equal(run.model.item.weight[:1], torch.zeros(1, 4).double())  # type: ignore[union-attr,index]


@pytest.mark.slow
def test_unconnected_workers_update_rows_of_their_own() -> None:
    one = job(OPTIMIZERS["adagrad"])
    # Of examples that are all alike, the mean of a share is that of the batch.
    x, y = (part[:1].expand(EXAMPLES, *part.shape[1:]) for part in one.data)
    one = dataclasses.replace(one, data=(x, y), eval_data=None)
    alone = hr.fit(one, hr.OneDevice(), device="cpu", engine=THREADS())
    run = hr.fit(one, hr.Unconnected(3), device="cpu", engine=THREADS())
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_strategies_are_compared_beside_a_ceiling(tmp_path: Path) -> None:
    one = dataclasses.replace(job(OPTIMIZERS["sgd"]), eval_data=None)
    found = hr.compare(one, [hr.Mirrored(2)], device="cpu", engine=THREADS(), retries=0, run_dir=tmp_path)
    assert found.references.ceiling_examples_per_s[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), *SYNCHRONOUS.values()])
def test_a_model_that_is_built_begins_with_its_own_rows_and_gives_what_torch_gives(strategy: hr.Strategy) -> None:
    one = dataclasses.replace(job(OPTIMIZERS["adagrad"], epochs=1), model=TwoTables())
    model = copy.deepcopy(one.model)
    assert isinstance(model, TwoTables)
    run = hr.fit(one, strategy, device="cpu", engine=THREADS())
    # With dense gradients: the same numbers, and torch's optimizers take them without a warning.
    model.item.sparse = model.seen.sparse = False
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    for x, y in _batches_of(one):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-9, atol=1e-9)
    assert not any("torch's draws" in event.text for event in run.events if isinstance(event, Notice))


def _batches_of(one: hr.Job) -> list[Any]:
    batches: list[Any] = []

    def collect(worker: hr.Worker) -> None:
        for batch in worker.batches():
            batches.append(batch)
            worker.step(batch)

    hr.launch(collect, one, device="cpu", engine=THREADS())
    return batches


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_other_strategies_and_numbers_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As tables that do not fit into memory: rows wait in a file, and checkpoints are mapped.
    monkeypatch.setattr(Spool.__init__, "__defaults__", (0,))
    monkeypatch.setattr(folder, "_MAPPED_BYTES", 0)
    ways = [
        hr.ParameterServer(workers=2, servers=3, staleness_bound=0),
        hr.Mirrored(2),
        hr.ParameterServer(workers=2, servers=2, staleness_bound=0, row_placement="range"),
    ]
    for epochs, strategy in enumerate(ways, 1):
        one = job(OPTIMIZERS["adam"], epochs)
        run = hr.fit(one, strategy, device="cpu", engine=THREADS(), run_dir=tmp_path, resume=epochs > 1)
    torch.testing.assert_close(weights(run), one_device("adam", 3)[0], rtol=1e-9, atol=1e-9)


class OpenVocabulary(nn.Module):
    """Words by their hashes; of 300 different ones, 60 rows are held."""

    def __init__(self) -> None:
        super().__init__()
        self.word = hr.limit_rows(nn.EmbeddingBag(1 << 50, 3, sparse=True, mode="sum", padding_idx=0), 60, "count")
        nn.init.normal_(self.word.weight, std=0.2)
        self.tower = nn.Linear(3, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tower(self.word(x))
        return output.squeeze(1)


def words_job(epochs: int = 2) -> hr.Job:
    one = job(OPTIMIZERS["adam"], epochs)
    (x, y) = one.data  # type: ignore[misc]
    x = hr.data.string_ids([[f"word {word}" for word in words] for words in x.tolist()], 1 << 50)
    return dataclasses.replace(one, model=OpenVocabulary, data=(x, y), eval_data=(x, y))


def words_of(run: hr.Run) -> dict[int, list[float]]:
    (block,) = run.model.word.source.blocks()  # type: ignore[union-attr,operator]
    return dict(zip(block.ids.tolist(), block.values.tolist(), strict=True))


@pytest.mark.slow
def test_an_open_vocabulary_holds_its_limit_and_the_same_rows_everywhere(tmp_path: Path) -> None:
    runs = {"one": hr.fit(words_job(), hr.OneDevice(), device="cpu", engine=THREADS())}
    runs["mirrored"] = hr.fit(words_job(), hr.Mirrored(2), device="cpu", engine=THREADS())
    server = hr.ParameterServer(workers=2, staleness_bound=0)
    # Halfway from a checkpoint, which has the uses of the rows.
    hr.fit(words_job(1), server, device="cpu", engine=THREADS(), run_dir=tmp_path)
    runs["server"] = hr.fit(words_job(), server, device="cpu", engine=THREADS(), run_dir=tmp_path, resume=True)
    expected = words_of(runs["one"])
    assert 0 < len(expected) <= 60
    for run in runs.values():
        found = words_of(run)
        assert found.keys() == expected.keys()
        assert all(found[word] == pytest.approx(row, rel=1e-9, abs=1e-9) for word, row in expected.items())
        (held,) = run.summary.cost.rows
        assert (held.name, held.held, held.most) == ("word", len(expected), 60)
        assert held.evicted > 100
    several = hr.fit(words_job(), hr.ParameterServer(workers=2, servers=2), device="cpu", engine=THREADS())
    (held,) = several.summary.cost.rows
    assert held.held <= held.most == 60
    assert len(words_of(several)) == held.held
    assert re.fullmatch(r"word \d+ of 60, \d+ evicted", dict(run_rows(several.summary))["rows held"])


class Commuting(nn.Module):
    """With the loss `product`, no gradient depends on the weights, and the order of pushes changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, 4, sparse=True, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.item(x[:, 0]).sum(1) + self.bias
        return output


def product(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


@pytest.mark.slow
def test_asynchronous_pushes_of_rows_count_once_each_when_a_server_is_killed(real_python: None) -> None:
    servers: dict[int, int] = {}
    killed: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, ServerStarted):
            servers.setdefault(event.rank, event.pid)
        elif isinstance(event, Stepped) and event.step >= 20 and not killed:
            killed.append(servers[2])
            os.kill(servers[2], signal.SIGKILL)

    one = dataclasses.replace(job(OPTIMIZERS["sgd"], epochs=8), model=Commuting, loss=product, eval_data=None)
    strategy = hr.ParameterServer(workers=2, servers=1, backups=1, rows=hr.RowOptions(prefetch=True, hot=30))
    run = hr.fit(one, strategy, device="cpu", on_event=kill)
    assert killed
    expected = hr.fit(one, hr.OneDevice(), device="cpu", engine=THREADS())
    torch.testing.assert_close(run.model.item.weight, expected.model.item.weight, rtol=1e-9, atol=1e-9)  # type: ignore[union-attr]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"item": nn.Embedding(ROWS, 4), "user": nn.Embedding(ROWS, 2)})
        self.tower = nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tower(torch.cat([self.tables["item"](x[:, 0]), self.tables["user"](x[:, 1])], 1))
        return output.squeeze(1)


@pytest.mark.slow
def test_layers_are_made_sparse_by_name() -> None:
    one = dataclasses.replace(job(OPTIMIZERS["sgd"], 1), model=Plain)
    run = hr.fit(one, hr.ParameterServer(workers=2, sparse=("*.item",)), device="cpu", engine=THREADS())
    assert [name for name, _ in run.model.named_parameters()] == [name for name, _ in Plain().named_parameters()]
    assert isinstance(run.model.tables["item"], nn.Embedding)  # type: ignore[index]
    # As the job's model has it: torch's Adam takes no sparse gradients.
    assert not run.model.tables["item"].sparse  # type: ignore[index]
    with pytest.raises(
        UsageError, match=r"sparse='item' is the name of no nn.Embedding .* has 'tables.item', 'tables.user'"
    ):
        hr.fit(one, hr.ParameterServer(workers=2, sparse=("item",)), device="cpu", engine=THREADS())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.out = nn.Embedding(ROWS, 4), nn.Linear(4, ROWS, bias=False)
        self.out.weight = self.item.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(self.item(x[:, 0])).sum(1)
        return output


class Vast(nn.Module):
    """A table that no machine has memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(10**11, 64, sparse=True)
        self.tower = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tower(self.item(x[:, 0])).squeeze(1)
        return output


REFUSED: dict[str, tuple[hr.Strategy, hr.Job, type[Exception], str]] = {
    "pipeline": (
        hr.Pipeline(2),
        job(OPTIMIZERS["sgd"]),
        UsageError,
        "pipeline does not train the sparse embedding 'item'",
    ),
    "slices": (hr.TensorParallel(2), job(OPTIMIZERS["sgd"]), UsageError, "tensor_parallel does not train the sparse"),
    "averages": (hr.LocalSGD(2), job(OPTIMIZERS["sgd"]), UsageError, "does not train the sparse embedding 'item'"),
    "stages on servers": (
        hr.Hybrid(hr.ParameterServer(2, servers=2), hr.Pipeline(2)),
        job(OPTIMIZERS["sgd"]),
        UsageError,
        "hybrid does not train the sparse embedding 'item'",
    ),
    "stages by name": (
        hr.Hybrid(hr.ParameterServer(2, servers=2, sparse=["*.item"]), hr.Pipeline(2)),
        dataclasses.replace(job(OPTIMIZERS["sgd"]), model=Plain),
        UsageError,
        "hybrid does not train the sparse embedding 'tables.item'",
    ),
    "tied": (
        hr.ParameterServer(2, sparse=["item"]),
        dataclasses.replace(job(OPTIMIZERS["sgd"]), model=Tied),
        JobError,
        "'item' is tied: it is 'item.weight' and 'out.weight'.*untie them, or use sparse=False",
    ),
    "fits nowhere": (
        hr.ParameterServer(2, servers=2),
        dataclasses.replace(job(OPTIMIZERS["adam"]), model=Vast),
        InfeasiblePlan,
        r"parameter_server needs [\d,]+ bytes on .* and it has [\d,]+ left; the largest table is 'item', "
        r"100,000,000,000 rows of 64; use servers on more hosts, or say by rows=hr.RowOptions\(expected=1000\)",
    ),
    "fits in no worker": (
        hr.Mirrored(2),
        dataclasses.replace(job(OPTIMIZERS["adam"]), model=Vast),
        InfeasiblePlan,
        r"mirrored needs [\d,]+ bytes on .*'item', 100,000,000,000 rows of 64; use parameter_server, with servers on",
    ),
    "decay": (
        hr.ParameterServer(2),
        job(functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
        UsageError,
        "weight_decay=0.1 shrinks every row in every step.*'item' travel; give the table a group with weight_decay=0",
    ),
    "dense adam": (hr.OneDevice(), job(torch.optim.Adam), UsageError, "Adam changes all rows of the table 'item'"),
    "too few rows": (
        hr.ParameterServer(workers=2, servers=2),
        dataclasses.replace(words_job(), global_batch_size=96),
        UsageError,
        r"one update changes \d+ rows of the table 'word', and 30 may be held here; raise max_rows",
    ),
    "limited and dense": (
        hr.OneDevice(),
        dataclasses.replace(words_job(), model=lambda: hr.limit_rows(nn.Embedding(9, 1), 5)),
        JobError,
        "the embedding '' has limited rows and is not sparse; make it with sparse=True",
    ),
    "clipping": (
        hr.OneDevice(),
        job(OPTIMIZERS["sgd"], clip_norm=1.0),
        UsageError,
        "clip_norm=1.0 with the sparse table",
    ),
}


@pytest.mark.parametrize(("strategy", "one", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_by_rows_is_refused_by_name(
    strategy: hr.Strategy, one: hr.Job, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        hr.fit(one, strategy, device="cpu", engine=THREADS())


@pytest.mark.parametrize("index", [ROWS, -1])
def test_a_late_index_out_of_range_is_refused_before_a_server_hears_of_it(index: int) -> None:
    late = job(OPTIMIZERS["sgd"])
    assert isinstance(late.data, tuple)
    late.data[0][-1, 0] = index
    strategy = hr.ParameterServer(2, servers=2, staleness_bound=0)
    with pytest.raises(DataError, match=f"'item' has {ROWS} rows, and the batch has the index {index};"):
        hr.fit(dataclasses.replace(late, eval_data=None), strategy, device="cpu", engine=THREADS())
