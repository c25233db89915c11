"""What a script asks of its processes: barrier, gather, sums and means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from api.plain_script.plain_runs import on_ranks, said
from headrace.api.plain_script.meeting import BACKWARD, Meeting
from headrace.api.plain_script.processes import ScriptProcesses
from headrace.errors import UsageError


def test_alone_the_processes_are_one() -> None:
    here = hr.processes()
    assert (here.rank, here.world, here.is_first) == (0, 1, True)
    here.barrier()
    assert (here.gather("a"), here.sum(2), here.mean(3.0, 4)) == (["a"], 2.0, 3.0)


def test_processes_count_together() -> None:
    def act(meeting: Meeting) -> tuple[Any, ...]:
        here = ScriptProcesses(meeting.rank, meeting.world, lambda: meeting)
        here.barrier()
        mean = here.mean(float(here.rank), 2 * here.rank + 1), here.mean(float("nan"), 0)
        return here.is_first, here.gather({"rank": [here.rank]}), here.sum(torch.tensor(1.5)), *mean  # type: ignore[arg-type]

    first, second = on_ranks(act)
    assert first == (True, [{"rank": [0]}, {"rank": [1]}], 3.0, 0.75, 0.0)
    assert second == (False, *first[1:])  # type: ignore[index]


def test_a_loss_with_a_graph_is_a_number_without_a_warning() -> None:
    loss = torch.ones(1, requires_grad=True).sum()
    for values in on_ranks(lambda meeting: (here_of(meeting).mean(loss, 2), here_of(meeting).sum(loss))):
        assert values == (1.0, 2.0)


def test_what_one_rank_alone_gathers_is_named() -> None:
    def act(meeting: Meeting) -> None:
        here = ScriptProcesses(meeting.rank, meeting.world, lambda: meeting)
        here.barrier() if here.is_first else here.sum(1)

    assert "rank 1 is at gather(), sum(), mean() or whole() of hr.processes()" in said(on_ranks(act))
    with pytest.raises(UsageError, match=r"use value.item\(\) or value.tolist\(\)"):
        ScriptProcesses(0, 2, Meeting).gather(torch.ones(2))  # type: ignore[arg-type]


def here_of(meeting: Meeting) -> ScriptProcesses:
    return ScriptProcesses(meeting.rank, meeting.world, lambda: meeting)


def test_shares_make_a_whole_again() -> None:
    batch = {"inputs": torch.arange(10).view(2, 5), "more": [torch.arange(5.0).view(1, 5) / 3]}

    def act(meeting: Meeting) -> tuple[Any, Any, float]:
        here = here_of(meeting)
        share = here.share(batch, dim=1)
        meeting.meet(BACKWARD)
        assert meeting.deliveries.last
        return share["inputs"].tolist(), here.whole(share, dim=1), meeting.deliveries.last.examples

    (first, one, examples), (second, other, _) = on_ranks(act)  # type: ignore[misc]
    assert (first, second, examples) == ([[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]], 3)
    for whole in (one, other):
        assert torch.equal(whole["inputs"], batch["inputs"])  # type: ignore[arg-type]
        assert torch.equal(whole["more"][0], batch["more"][0])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda here: here.share((torch.ones(4), torch.ones(3))), "they have 3 and 4 examples in dim 0"),
        (lambda here: here.share([1, 2]), "share takes tensors, in tuples, lists and dicts, and got list"),
        (lambda here: here.whole(torch.tensor(2.0)), "got one of shape []; sum(), mean() and gather() take numbers"),
        (lambda here: here.whole(torch.ones(2, 3 + here.rank)), "whole joins the tensors of all processes along dim 0"),
        (lambda here: here.on_first(torch.zeros, -1), "must be non-negative"),
    ],
)
def test_what_has_no_shares_is_refused(act: Any, message: str) -> None:
    assert message in said(on_ranks(lambda meeting: act(here_of(meeting))))


def test_shares_of_what_ranks_have_drawn_otherwise_are_refused() -> None:
    def act(meeting: Meeting) -> None:
        here_of(meeting).share(torch.ones(4) * meeting.rank)
        meeting.meet(BACKWARD)

    assert "random numbers of it are drawn within hr.processes().common()" in said(on_ranks(act))


def test_a_share_that_lives_is_meant_by_every_pass() -> None:
    """Where another of other parts comes between, it is not known which one a pass is of."""

    def act(meeting: Meeting) -> tuple[int, int]:
        training = here_of(meeting).share(torch.ones(5))
        first = meeting.deliveries.current()
        evaluation = here_of(meeting).share(torch.ones(3))
        with pytest.raises(UsageError, match="which of them the loss is of is not known"):
            meeting.deliveries.current()
        del evaluation
        meeting.deliveries.current()
        assert first
        return first.examples, len(training)

    assert on_ranks(act) == [(3, 3), (2, 2)]


def test_rank_0_saves_and_all_load(tmp_path: Path) -> None:
    def act(meeting: Meeting) -> Any:
        here = here_of(meeting)
        here.on_first(torch.save, {"rank": here.rank}, tmp_path / "model.pt")
        return torch.load(tmp_path / "model.pt")

    assert on_ranks(act) == [{"rank": 0}] * 2
