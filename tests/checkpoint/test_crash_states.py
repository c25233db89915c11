"""Whatever a power cut leaves, the newest checkpoint is a whole one, and the one that was promised."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from checkpoint.crash_histories import MUTANTS, at_once, complaint, different, history, killed_histories
from checkpoint.model_disk import ModelDisk, crashes
from headrace.checkpoint import CheckpointFolder

STATES = 1000
"""benchmarks/checkpoint-crash/ does 100,000."""


def test_the_model_loses_what_was_not_synced_and_keeps_what_was() -> None:
    disk = ModelDisk()
    disk.make_folder("a")
    file = disk.create("a/x")
    file.write(memoryview(b"12345678"))
    trees = [crash.tree for crash in crashes(disk.acts, random.Random(0), 10**6, len(disk.acts))]
    assert len(trees) == 2 * 2 * 4
    assert {} in trees
    assert {"a": {}} in trees
    assert {"a": {"x": b""}} in trees
    assert {"a": {"x": bytes(8)}} in trees
    assert {"a": {"x": b"12345678"}} in trees
    for sync in (file.sync, lambda: disk.sync("a"), lambda: disk.sync("")):
        sync()
    assert [crash.tree for crash in crashes(disk.acts, random.Random(0), 10**6, len(disk.acts))] == [
        {"a": {"x": b"12345678"}}
    ]
    disk.rename("a", "b")
    trees = [crash.tree for crash in crashes(disk.acts, random.Random(0), 10**6, len(disk.acts))]
    assert trees == [{"a": {"x": b"12345678"}}, {"b": {"x": b"12345678"}}]


@pytest.mark.slow
def test_every_crash_leaves_a_whole_checkpoint() -> None:
    dice = random.Random(0)
    acts = at_once(history().acts, dice)
    found = different(crashes(acts, dice, 40))
    assert len(found) > STATES
    assert {complaint(crash) for crash in found} == {""}


@pytest.mark.slow
def test_so_does_every_crash_after_a_process_was_killed_and_another_went_on() -> None:
    dice = random.Random(0)
    found = [crash for disk, since in killed_histories() for crash in crashes(disk.acts, dice, 1, since)]
    assert len(found) > STATES
    assert {complaint(crash) for crash in different(found)} == {""}


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_leaving_out_any_part_is_found(mutant: str) -> None:
    dice = random.Random(0)
    plain = crashes(MUTANTS[mutant](history().acts), dice, 12)
    killed = (crash for disk, _ in killed_histories() for crash in crashes(MUTANTS[mutant](disk.acts), dice, 1))
    assert any(complaint(crash) for crash in itertools.chain(plain, killed))


@pytest.mark.slow
def test_a_save_goes_through_on_whatever_a_crash_left() -> None:
    dice = random.Random(1)
    for crash in dice.sample(list(crashes(history().acts, dice, 2)), 50):
        disk = ModelDisk(crash.tree)
        folder = CheckpointFolder(Path("model"), disk)
        folder.begin(60)
        assert not [name for name in disk.entries("") if name.endswith(".old")]
        folder.commit(60, [folder.write(60, 0, {})], {}, 2)
        newest, wrong = folder.latest()
        assert newest is not None
        assert (newest.step, wrong) == (60, ())
