"""The GAN learns on two workers, as on one: what it makes comes near to the data."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gan"
MODULES = ("job", "draw")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        # Under names of their own, since other examples have a job.py, too.
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            sys.modules.pop(name, None)


def test_the_distance_is_that_of_means_and_of_variances(modules: dict[str, Any]) -> None:
    distance = modules["draw"].frechet_distance
    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    assert distance(draws, draws) == pytest.approx(0.0, abs=1e-6)
    assert distance(draws, draws + torch.tensor([3.0, 4.0, 0.0])) == pytest.approx(25.0, abs=1e-4)
    # Standard deviations s and 3 s of three numbers: the sum of (3 s - s)^2.
    assert distance(draws, 3 * draws) == pytest.approx(
        4 * float(draws.var(0).sum()) + 4 * float(draws.mean(0).square().sum())
    )


@pytest.mark.slow
def test_what_it_makes_comes_near_to_the_data(modules: dict[str, Any], tmp_path: Path) -> None:
    job, draw = modules["job"].job(epochs=15), modules["draw"]
    run = hr.fit(job, hr.Mirrored(workers=2), device="cpu", run_dir=tmp_path)
    images = hr.data.digits().test_images
    before, after = (
        draw.frechet_distance(draw.made_by(model.eval(), len(images)), images) for model in (run.template, run.model)
    )
    assert after < 0.6 * before
    assert {"loss/discriminator", "loss/generator"} == set(run.metrics)
    draw.main(str(tmp_path), str(tmp_path / "digits.png"))
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_two_workers_give_what_one_gives(modules: dict[str, Any]) -> None:
    job = modules["job"].job(epochs=1)
    one, two = (
        hr.fit(job, each, engine=hr.ThreadEngine(), device="cpu").model for each in ("one_device", hr.Mirrored(2))
    )
    theirs = two.state_dict()
    assert max(float((each - theirs[name]).abs().max()) for name, each in one.state_dict().items()) < 1e-4
