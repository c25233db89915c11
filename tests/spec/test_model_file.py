"""A model's file: what a person writes from a paper, what a profile says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.spec.compute import BatchProfile, ComputeProfile
from headrace.spec.model import ModelSpec

RATE = """
name = "resnet50"
parameters = 25_600_000
batch_size = 64
examples_per_s = 200
"""
LAYERS = """
batch_size = 8
[[layers]]
name = "stem"
parameter_mb = 4
forward_ms = 2
backward_ms = 4
crossing_mb = 1
activation_mb = 3
[[layers]]
name = "head"
parameters = 10
forward_ms = 1
backward_ms = 1
"""


@pytest.fixture
def load(tmp_path: Path):
    def read(text: str) -> ModelSpec:
        file = tmp_path / "model.toml"
        file.write_text(text)
        return ModelSpec.load(file)

    return read


def test_parameters_and_one_throughput_are_enough(load) -> None:
    model = load(RATE + "optimizer_ms = 20")
    assert model.name == "resnet50"
    assert model.trainable_bytes == 102_400_000
    assert model.compute is not None
    batch = model.compute.at(64)
    assert batch.forward_s + batch.backward_s + model.compute.optimizer_s == pytest.approx(64 / 200)
    assert batch.backward_s == pytest.approx(2 * batch.forward_s)
    assert model.compute.at(32).forward_s == pytest.approx(batch.forward_s / 2)


def test_parameters_and_operations_are_enough(load) -> None:
    model = load("parameter_mb = 4\nflops_per_example = 8e9")
    assert (model.trainable_bytes, model.flops_per_example, model.compute) == (4_000_000, 8e9, None)


def test_layers_say_what_a_batch_takes(load) -> None:
    model = load(LAYERS)
    assert model.compute is not None
    assert [layer.name for layer in model.layers] == ["stem", "head"]
    assert [parameter.bytes for parameter in model.parameters] == [4_000_000, 40]
    assert model.compute.at(8).forward_s == pytest.approx(0.003)
    twice = model.compute.at(16)
    assert [layer.backward_s for layer in twice.layers] == pytest.approx([0.008, 0.002])
    assert [layer.crossing_bytes for layer in twice.layers] == [2_000_000, 0]
    assert twice.saved_bytes == 6_000_000


def test_a_profile_of_several_batches_is_read_between_and_beyond_them(load, tmp_path: Path) -> None:
    more = "[[measured]]\nbatch_size = 128\nforward_ms = 200\nbackward_ms = 400"
    model = load("parameters = 8\nbatch_size = 64\nforward_ms = 110\nbackward_ms = 220\n" + more)
    profile = model.compute
    assert profile is not None
    assert profile.at(96).forward_s == pytest.approx(0.155)
    assert profile.at(192).backward_s == pytest.approx(0.58)
    assert profile.at(1).forward_s == pytest.approx(0.11 - 63 * 0.09 / 64)
    model.save(tmp_path / "model.json")
    assert ModelSpec.load(tmp_path / "model.json") == model


def test_another_batch_has_the_layers_in_proportion(load) -> None:
    more = "[[measured]]\nbatch_size = {}\nforward_ms = 6\nbackward_ms = 20\n"
    for size in (4, 16):
        model = load(LAYERS + more.format(size))
        assert model.compute is not None
        other = model.compute.at(size)
        assert [layer.forward_s for layer in other.layers] == pytest.approx([0.004, 0.002])
        assert [layer.backward_s for layer in other.layers] == pytest.approx([0.016, 0.004])
        assert [layer.crossing_bytes for layer in other.layers] == [size * 125_000, 0]
        assert other.saved_bytes == sum(layer.saved_bytes for layer in other.layers) == size * 375_000
        assert len(model.layers) == len(model.compute.at(8).layers) == len(model.compute.at(12).layers) == 2
    said = load(LAYERS + more.format(16) + "activation_mb = 4").compute
    assert said is not None
    assert said.at(16).saved_bytes == said.at(16).layers[0].saved_bytes == 4_000_000


def test_a_line_never_goes_below_what_is_in_proportion() -> None:
    profile = ComputeProfile((BatchProfile(10, 1.0, 2.0), BatchProfile(20, 9.0, 4.0)))
    assert profile.at(5).forward_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch_size = 1\nexamples_per_s = 1", "needs either parameters or parameter_mb"),
        ("parameters = 1\nparameter_mb = 1", "needs either parameters or parameter_mb"),
        ("parameters = -1\nflops_per_example = 1", "parameters must be a number of at least 0, got -1"),
        ("parameters = 1", "nothing says how long a step takes"),
        ("parameters = 1\nbatch_size = 0\nexamples_per_s = 1", "batch_size must be a whole number of at least 1"),
        (RATE + "optimizer_ms = 400", "would leave no time for forward and backward"),
        (RATE + "examples_s = 3", "did you mean 'examples_per_s'"),
        ("parameters = 1\nbatch_size = 1\nforward_ms = nan\nbackward_ms = 1", "forward_ms must be a number"),
        (LAYERS.replace("backward_ms = 4", "backward_ms = -4"), r"layers\[0\].backward_ms must be a number"),
        ("parameters = 1e15\nflops_per_example = 1", "is it in another unit"),
        ("parameter_mb = 1e-6\nflops_per_example = 1", "parameter_mb is in millions of bytes"),
        (RATE + 'dtype = "fp32"', "dtype"),
        (LAYERS.replace("head", "stem"), r"layers\[0\] and layers\[1\] have one name, 'stem'"),
    ],
)
def test_what_is_refused(load, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(text)


def test_a_profile_with_nan_is_refused(tmp_path: Path, load) -> None:
    load(RATE).save(tmp_path / "model.json")
    text = (tmp_path / "model.json").read_text().replace('"spread": null', '"spread": NaN')
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UsageError, match="spread of the profile must be a number of at least 0, got nan"):
        ModelSpec.load(tmp_path / "model.json")


def test_more_operations_a_second_than_any_device_does_are_refused(load) -> None:
    text = "parameters = 1\nbatch_size = 64\nexamples_per_s = 200\nflops_per_example = "
    assert load(text + "4e9").flops_per_example == 4e9
    with pytest.raises(UsageError, match=r"in 320 ms is 24,000,000 TFLOP/s, .* and no device does 10,000; correct one"):
        load(text + "4e16")
