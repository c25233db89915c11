"""hr.summary: numbers that can be added up by hand."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import headrace as hr


class Model(nn.Module):
    """A convolution, a shared linear layer that is called twice, a frozen one, a scale, and a layer never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten())
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 3).requires_grad_(False)
        self.unused = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.conv(inputs) * self.scale.repeat_interleave(4)
        output: Tensor = self.frozen(self.twice(self.twice(features)))
        return output


def job(model: object = Model) -> hr.Job:
    inputs, targets = torch.randn(10, 1, 4, 4), torch.zeros(10, dtype=torch.int64)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return hr.Job(
        model=model,
        task=hr.tasks.multiclass(3),
        optimizer=optimizer,
        data=(inputs, targets),
        global_batch_size=5,
        epochs=1,
    )  # type: ignore[arg-type]


def test_layers_parameters_bytes_and_flops() -> None:
    found = hr.summary(job())
    layers = {each.name: each for each in found.layers}
    assert [each.name for each in found.layers] == ["conv.0", "conv.1", "conv.2", "twice", "frozen", "", "unused"]
    assert {name: (each.kind, each.output) for name, each in layers.items()} == {
        "conv.0": ("Conv2d", "2 × 2 × 2"),
        "conv.1": ("BatchNorm2d", "2 × 2 × 2"),
        "conv.2": ("Flatten", "8"),
        "twice": ("Linear", "8"),
        "frozen": ("Linear", "3"),
        "": ("Model", "3"),
        "unused": ("Linear", ""),
    }
    parameters = {"conv.0": 18, "conv.1": 4, "conv.2": 0, "twice": 72, "frozen": 27, "": 2, "unused": 30}
    assert {name: each.parameters for name, each in layers.items()} == parameters
    assert (layers["frozen"].trainable, layers["frozen"].bytes) == (0, 108)
    # Two operations a multiplication: 9 for each of 8 elements; 8 x 8 twice; 8 x 3.
    assert (layers["conv.0"].flops, layers["twice"].flops, layers["frozen"].flops) == (144, 256, 48)
    assert (found.parameters, found.trainable, found.parameter_bytes, found.flops) == (153, 126, 612, 448)
    # Means, variances, and a count of batches.
    assert found.buffer_bytes == 24
    # Gradients and momentum of what is trained.
    assert found.training_bytes == 612 + 2 * 504


def test_it_is_shown_as_a_table_and_the_model_stays_as_it_is() -> None:
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = hr.summary(job(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "27 (frozen)" in text
    assert "not called" in text
    assert "Model: 153 parameters (612 B), 27 of them frozen; buffers 24 B" in text
    element = ElementTree.fromstring(found._repr_html_())
    assert len(list(element.iter("tr"))) == 8


def test_a_hostile_name_of_a_layer_is_text() -> None:
    layers = {"flat": nn.Flatten(), "<script>": nn.Linear(16, 3)}
    shown = hr.summary(job(nn.Sequential(OrderedDict(layers))))._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_a_tied_parameter_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.second.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            output: Tensor = self.second(self.first(inputs.flatten(1)))[:, :3]
            return output

    found = hr.summary(job(Tied))
    assert [each.parameters for each in found.layers] == [256, 0]
    assert found.parameters == 256


def test_sparse_embeddings_are_named_beside_the_parameters() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(100, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            output: Tensor = self.head(self.words(ids).mean(1))
            return output

    plain = hr.Job(
        model=Words, task=hr.tasks.multiclass(3), optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(torch.randint(100, (10, 5)), torch.zeros(10, dtype=torch.int64)), global_batch_size=5, epochs=1,
    )  # fmt: skip
    found = hr.summary(plain)
    assert found.parameters == 15
    assert found.table_bytes == {"words": 1600}


def test_texts_in_the_examples_are_no_examples() -> None:
    examples = [{"name": f"image {number}", "inputs": torch.randn(1, 4, 4)} for number in range(4)]
    named = dataclasses.replace(job(), data=examples, inputs="inputs", task=None, loss=lambda output, _: output.mean())
    assert hr.summary(named).flops == hr.summary(job()).flops


def test_a_terminal_without_lines_and_signs_gets_plain_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    job = hr.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3)), task=hr.tasks.multiclass(3),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(torch.zeros(8, 4), torch.zeros(8).long()), global_batch_size=4, epochs=1,
    )  # fmt: skip
    found = hr.summary(job)
    assert not str(found).isascii()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert str(found).isascii()
