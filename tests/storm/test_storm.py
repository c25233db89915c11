"""The checker finds what is planted, and nothing in a sound run; a schedule that fails is made shorter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.spec.events import LAUNCHER, PushesApplied, RunEnded, RunStarted, Stepped
from storm.checker import problems
from storm.evidence import Attempt, Evidence, Strike
from storm.faults import damage
from storm.jobs import BATCH, ROUNDS
from storm.plants import PLANTS
from storm.schedule import KINDS, Fault, draw, reduce


def step(number: int, rank: int) -> Stepped:
    return Stepped(rank, float(number), number, 0, BATCH // 2, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def begin(resumed: int = 0) -> RunStarted:
    return RunStarted(LAUNCHER, 0.0, "mirrored", 2, "cpu", 1, BATCH, 4 * BATCH, "", {}, {}, resumed_step=resumed)


@pytest.fixture
def sound() -> Evidence:
    """A run that ended in round 12, was resumed at 8, and then came to its end."""
    steps = [step(number, rank) for number in range(ROUNDS) for rank in (0, 1)]
    events = (begin(), *steps[:24], begin(8), *steps[16:], RunEnded(LAUNCHER, 99.0, "ok"))
    return Evidence("mirrored", (Attempt((), 0, 1.0, ""),), events, "1" * 64, "1" * 64)


def test_nothing_is_wrong_with_a_sound_run(sound: Evidence) -> None:
    assert problems(sound) == []


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(sound: Evidence, name: str) -> None:
    assert problems(PLANTS[name](sound))


def test_a_lease_that_is_applied_twice_is_found(sound: Evidence) -> None:
    once, twice = (PushesApplied(2, 50.0, (0,) * count, (7,) * count, (), (1,) * count) for count in (1, 2))
    assert problems(replace(sound, events=(*sound.events, once))) == []
    assert "rank 2 applied lease 7 twice" in problems(replace(sound, events=(*sound.events, twice)))


def test_a_seed_draws_the_same_faults() -> None:
    assert draw(3, 50) == draw(3, 50) != draw(4, 50)
    assert {fault.kind for fault in draw(3, 500)} == set(KINDS)


def test_a_schedule_that_fails_is_reduced_to_the_faults_that_it_needs() -> None:
    faults = draw(1, 12)
    needed = {faults[2], faults[9]}
    assert reduce(faults, lambda part: needed <= set(part)) == (faults[2], faults[9])
    assert reduce(faults, lambda part: faults[5] in part) == (faults[5],)
    assert reduce(faults, lambda part: True) == ()


@pytest.mark.parametrize(("kind", "bytes_left"), [("damaged checkpoint", 64), ("cut checkpoint", None)])
def test_only_the_newest_checkpoint_is_damaged(tmp_path: Path, kind: str, bytes_left: int | None) -> None:
    for name in ("step-00000008", "step-00000016", "step-00000024.part"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "rank-0.safetensors").write_bytes(bytes(64))
    damage(Fault(kind, 1, 5), tmp_path)
    damaged = [path.parent.name for path in tmp_path.rglob("*.safetensors") if path.read_bytes() != bytes(64)]
    assert damaged == ["step-00000016"]
    content = (tmp_path / "checkpoints" / "step-00000016" / "rank-0.safetensors").read_bytes()
    assert len(content) == bytes_left if bytes_left else len(content) < 64


def test_events_that_a_full_disk_did_not_take_are_not_missed(sound: Evidence) -> None:
    full = Strike(Fault("full disk", 1, 0), (), 0.5)
    missing = PLANTS["a round is missing"](sound)
    assert problems(missing)
    assert problems(replace(missing, attempts=(replace(missing.attempts[0], strikes=(full,)),))) == []
