"""Collectives of torch.distributed, over gloo in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.conftest import Play

pytestmark = pytest.mark.slow


def test_every_verb_gives_what_the_collective_promises(play: Play, tmp_path: Path) -> None:
    assert play("use_the_wire", 2, store=str(tmp_path / "store")) == [[], []]


def test_gradients_sum_to_the_same_bits_through_memory_and_over_the_wire(play: Play, tmp_path: Path) -> None:
    assert play("reduce_both_ways", 2, store=str(tmp_path / "store")) == [[], []]
