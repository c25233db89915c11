"""The checker finds what is planted, and nothing in a sound run; a schedule that fails is made shorter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from headrace.spec.events import LAUNCHER, PushesApplied, RunEnded, RunStarted, Stepped
from storm import hosts
from storm.checker import problems
from storm.clock import HOST, Clocks
from storm.evidence import Attempt, Evidence, Strike
from storm.faults import damage
from storm.hosts import STILL
from storm.jobs import BATCH, ROUNDS
from storm.plants import PLANTS
from storm.schedule import KINDS, Fault, draw, read, reduce
from storm.tally import tally
from wall_clock import COMPILER


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


def test_a_last_event_that_was_told_to_be_lost_is_not_missed(sound: Evidence) -> None:
    # Found by scripts/storm, seed 4058.
    unsaid = replace(sound, events=sound.events[:-1])
    assert problems(unsaid) == ["the command ended well, but its last event does not say so"]
    told = "headrace: runs/a takes nothing more (File too large): the run's last events are lost, and its report is"
    small = Strike(Fault("small files", 1, 0), (0,), 0.5)
    assert problems(replace(unsaid, attempts=(replace(sound.attempts[0], strikes=(small,), said=told),))) == []


def test_a_model_that_the_error_names_is_not_left(sound: Evidence) -> None:
    files = ("headrace-model-1", "headrace-model-1/model.safetensors")
    path = "/tmp/a/headrace-model-1/model.safetensors"
    said = f"UnfitMachine: rank 0 cannot save the trained model; it is kept in {path}\n"
    full = Strike(Fault("full disk", 1, 0), (), 0.5)
    kept = replace(sound.attempts[0], strikes=(full,), code=3, said=said, files=files)
    assert problems(replace(sound, attempts=(kept, *sound.attempts))) == []
    more = replace(kept, files=(*files, "headrace-2"))
    assert problems(replace(sound, attempts=(more, *sound.attempts))) == [
        "attempt 0 (full disk@1/0): files are left: ('headrace-2',)"
    ]


def test_what_a_process_without_memory_leaves_half_written_is_not_counted(sound: Evidence) -> None:
    # Found by scripts/storm, seed 4119.
    files = ("headrace-model-1", "headrace-model-1/.tmpLhNYVN", "headrace-2")
    little = Strike(Fault("little memory", 1, 0), (0,), 0.5)
    for said, left in (("memory allocation of 1048576 bytes failed", files[2:]), ("ended", files)):
        ended = replace(sound.attempts[0], strikes=(little,), code=3, said=said, files=files)
        found = problems(replace(sound, attempts=(ended, *sound.attempts)))
        assert found == [f"attempt 0 (little memory@1/0): files are left: {left}"]


def test_a_process_without_descriptors_deletes_no_half_checkpoint(sound: Evidence) -> None:
    # Found by scripts/storm, seed 1021.
    half = replace(sound, unfinished=("step-00000048.part",))
    few, many = (Strike(Fault(kind, 1, 0), (0,), 0.5) for kind in ("few descriptors", "pause"))
    assert problems(replace(half, attempts=(replace(sound.attempts[0], strikes=(few,)),))) == []
    assert problems(replace(half, attempts=(replace(sound.attempts[0], strikes=(many,)),))) == [
        "checkpoints are half done: ('step-00000048.part',)"
    ]


def test_two_servers_that_both_lead_are_found(sound: Evidence) -> None:
    leader = PushesApplied(2, 50.0, (0, 1), (7, 8), (), (1, 2))
    follows, leads = (structs.replace(leader, rank=3, leases=leases) for leases in ((7, 8), (7, 9)))
    assert problems(replace(sound, events=(*sound.events, leader, follows))) == []
    found = problems(replace(sound, events=(*sound.events, leader, leads)))
    assert found == ["two leaders: version 2 is of lease 8, by rank 3 of 9"]


def test_two_groups_that_both_go_on_are_found(sound: Evidence) -> None:
    elastic = replace(sound, strategy="elastic")
    lost, others = structs.replace(step(5, 2), examples=BATCH // 2), structs.replace(step(5, 2), examples=BATCH)
    assert problems(replace(elastic, events=(*sound.events, lost))) == []
    assert problems(replace(elastic, events=(*sound.events, others))) == [
        f"two groups of workers did rounds of {BATCH} examples: {{5: {2 * BATCH}}}"
    ]


def test_a_printed_fault_is_read_again() -> None:
    assert [read(str(fault)) for fault in draw(7, 50)] == list(draw(7, 50))
    with pytest.raises(ValueError, match="'kill@x/1' is no fault; one is KIND@STEPS/PICK"):
        read("kill@x/1")


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_the_clock_of_one_host_jumps_and_no_other(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks", 3)
    host = clocks.jump(7)
    code = "import time, datetime; print(time.time(), datetime.datetime.now().timestamp())"
    jumps = {}
    for each in range(3):
        command, environment = [sys.executable, "-c", code], {**os.environ, **clocks.environment(), HOST: str(each)}
        now = time.time()
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        jumps[each] = {abs(float(at) - now) > 30 for at in said}
    assert jumps == {each: {each == host} for each in range(3)}


def test_storms_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "storm.jsonl"
    assert tally(path).startswith("storm.jsonl: 0 runs, 0 faults, 0.00 hours;")
    rows = [
        {"seed": 1, "strategy": "a", "struck": 3, "wrong": ["x"]},
        {"seed": 1, "strategy": "a", "struck": 4, "seconds": 1800.0, "wrong": []},
        {"seed": 2, "strategy": "b", "struck": 1, "seconds": 900.0, "wrong": ["y"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tally(path) == (
        "storm.jsonl: 3 runs, 8 faults, 0.75 hours (not counted: of 1 of the runs); "
        "something wrong with 2 seeds, 1 of them right since"
    )


def _ranks(*codes: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", code]) for code in codes]


@pytest.mark.slow
def test_a_frozen_rank_is_ended_soon_and_is_none_that_waits(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by scripts/storm, seed 2015: on a busy machine it was there, and no longer stopped, after it was killed.
    monkeypatch.setattr(hosts, "FROZEN_S", 0.2)
    monkeypatch.setattr(hosts, "POLL_S", 0.0)
    ranks = _ranks("", "import time; time.sleep(600)")
    ranks[1].send_signal(signal.SIGSTOP)
    hosts._await(ranks)
    assert [rank.wait() for rank in ranks] == [0, -signal.SIGKILL]
    assert STILL not in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_goes_on_alone_is_told_of(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ENDS_WITHIN_S", 0.5)
    ranks = _ranks("", "import time; time.sleep(600)")
    hosts._await(ranks)
    assert [rank.wait() for rank in ranks] == [0, -signal.SIGKILL]
    assert capfd.readouterr().err.count(f"{STILL}, process {ranks[1].pid}") == 1
