from __future__ import annotations

import pytest

from headrace import errors
from headrace.errors import HeadraceError, NonFiniteLoss, PeerLost, UnknownName, UsageError, WorkerFailed


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("HeadraceError", 1),
        ("UsageError", 2),
        ("UnknownName", 2),
        ("CheckpointMismatch", 2),
        ("JobError", 2),
        ("InfeasiblePlan", 2),
        ("UnfitMachine", 3),
        ("DataError", 5),
        ("CorruptCheckpoint", 5),
        ("RunFailed", 1),
        ("WorkerFailed", 1),
        ("NoStandardInput", 2),
        ("NonFiniteGradient", 1),
        ("NonFiniteLoss", 1),
        ("PeerLost", 4),
        ("PeersApart", 4),
        ("ForkServerLost", 4),
        ("Replaced", 4),
        ("LeftBehind", 4),
        ("ServerRefused", 1),
        ("RanksDiffer", 1),
    ],
)
def test_exit_codes_are_those_of_the_design(name: str, code: int) -> None:
    assert getattr(errors, name).exit_code == code


def test_the_table_above_is_complete() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(kind, HeadraceError) for kind in kinds)
    assert len(kinds) == 22


def test_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    error = UnknownName("strategy", "mirored", ["one_device", "mirrored"])
    assert str(error) == "there is no strategy 'mirored'; did you mean 'mirrored'? known: mirrored, one_device"
    assert isinstance(error, UsageError)


def test_an_unknown_name_without_a_near_one_does_not_guess() -> None:
    assert str(UnknownName("key", "x", [])) == "there is no key 'x'; known: none"
    assert "did you mean" not in str(UnknownName("key", "zzz", ["alpha"]))


def test_a_workers_failure_carries_who_and_what() -> None:
    error = WorkerFailed(3, "node1", "ValueError: no", traceback="Traceback ...", exit_code=5)
    assert (error.rank, error.host, error.cause, error.traceback) == (3, "node1", "ValueError: no", "Traceback ...")
    assert error.worker_exit_code == 5
    assert str(error) == "rank 3 on node1 failed: ValueError: no"


def test_a_lost_peer_and_a_loss_that_is_no_number_are_named() -> None:
    lost = PeerLost(1, "node1", "killed by signal 9 (SIGKILL)")
    assert (lost.rank, lost.host, lost.cause) == (1, "node1", "killed by signal 9 (SIGKILL)")
    assert str(lost) == "rank 1 on node1 was lost: killed by signal 9 (SIGKILL)"
    nan = NonFiniteLoss(2, 17, float("nan"))
    assert (nan.rank, nan.step) == (2, 17)
    assert "the loss is nan on rank 2 at step 17" in str(nan)
    assert "clip_norm" in str(nan)


def test_usage_and_data_errors_are_value_errors_too() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(errors.DataError, ValueError)
    assert not issubclass(errors.RunFailed, ValueError)
