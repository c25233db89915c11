"""The batch size, the devices and the strategy together that reach a goal."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.prediction.recommendation.goals import recommend_for_goal
from headrace.prediction.recommendation.recommend import recommend
from headrace.prediction.steps_to_goal import steps_at
from headrace.spec.model import ModelSpec

MODEL = """
name = "net"
parameters = 250_000_000
batch_size = 64
examples_per_s = 100.0
[goal]
goal = "accuracy 0.9"
global_batch_size = 64
steps = 6_000
critical_batch = {critical}
"""
CLUSTER = """
device = "cuda"
[[hosts]]
name = "gpu"
cores = 16
memory_gb = 64
accelerators = 8
device_memory_gb = 16
bus_gb_per_s = 3.0
"""


def files(folder: Path, critical: float = 1000.0) -> tuple[Path, Path]:
    model, cluster = folder / "model.toml", folder / "cluster.toml"
    model.write_text(MODEL.format(critical=critical))
    cluster.write_text(CLUSTER)
    return model, cluster


def test_examples_follow_the_batch(tmp_path: Path) -> None:
    model, cluster = files(tmp_path)
    found = recommend_for_goal(model, cluster, "accuracy 0.9")
    assert [each.batch for each in found.choices] == [8, 16, 32, 64, 128, 256, 512, 1024]
    known = ModelSpec.load(model).to_goal
    assert known is not None
    for each in found.choices:
        assert each.steps == steps_at(known, each.batch)
        alone = recommend(model, cluster, global_batch_size=each.batch, examples=each.batch * each.steps)
        assert each.advice.winner.seconds == alone.winner.seconds
    # Where the noise is large, more devices are worth larger batches.
    assert found.best.batch > 64
    assert found.best.rate_factor > 1
    assert found.ranked()[0] is found.best
    assert len(found.ranked()) == 3


def test_without_noise_a_larger_batch_brings_nothing(tmp_path: Path) -> None:
    found = recommend_for_goal(*files(tmp_path, 0.0), "accuracy 0.9")
    assert {each.steps for each in found.choices} == {6000}
    assert found.best.batch <= 64


def test_what_the_model_does_not_say_is_refused(tmp_path: Path) -> None:
    model, cluster = files(tmp_path)
    with pytest.raises(UsageError, match=r"goal is 'accuracy 0\.9', not 'accuracy 0\.95'"):
        recommend_for_goal(model, cluster, "accuracy 0.95")
    with pytest.raises(UsageError, match="one of noise, linear, sqrt, same, got 'cubic'"):
        recommend_for_goal(model, cluster, "accuracy 0.9", rate_rule="cubic")
    text = model.read_text()
    model.write_text(text[: text.index("[goal]")])
    with pytest.raises(UsageError, match=r'headrace profile JOB\.py --goal "accuracy 0\.9"'):
        recommend_for_goal(model, cluster, "accuracy 0.9")
    model.write_text(text.replace("steps = 6_000", "steps = 0"))
    with pytest.raises(UsageError, match="steps"):
        ModelSpec.load(model)
