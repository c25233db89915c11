"""Links move units: through shared memory, and by the collectives of hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.errors import UsageError
from headrace.fully_sharded.link import CollectiveLink, OwnGradients, SharedLink, UnitGather, UnitLink, UnitScatter

WORLD, UNITS = 3, ("body", "head", "")
SIZES = (5, 2, 0)
"""Elements of a rank's part of each unit."""
KINDS = pytest.mark.parametrize("kind", ["shared", "hosts", "devices"])


def link_of(kind: str, group: ThreadCollective) -> UnitLink:
    if kind == "shared":
        return SharedLink(group, UNITS, 8 * WORLD * max(SIZES), 8 * WORLD * max(SIZES))
    if kind == "devices":
        carrier = group.subgroup(range(WORLD))
        vars(carrier)["queued"] = True
        return CollectiveLink(group, UNITS, carrier, torch.device("cpu"))
    return CollectiveLink(group, UNITS, group, torch.device("cpu"))


def numbers(rank: int, unit: int, turn: int, elements: int) -> Tensor:
    return torch.arange(elements, dtype=torch.float64) / 7 + 100 * rank + 10 * unit + turn


@KINDS
def test_units_are_gathered_and_summed_in_any_order_that_all_have(kind: str) -> None:
    order = [0, 1, 1, 0, 2, 1, 2, 0, 0]

    def act(group: ThreadCollective) -> list[tuple[Tensor, Tensor]]:
        link, found = link_of(kind, group), []
        for turn, unit in enumerate(order):
            size, cpu = SIZES[unit], torch.device("cpu")
            gather, scatter = UnitGather(link, unit), UnitScatter(link, unit)
            whole = gather.allocate((WORLD * size,), dtype=torch.float64, device=cpu)
            own = whole[group.rank * size : (group.rank + 1) * size]
            own.copy_(numbers(group.rank, unit, turn, size))
            gather(whole, own, None)  # type: ignore[arg-type]
            whole = whole.clone()
            gradient = scatter.allocate((WORLD * size,), dtype=torch.float64, device=cpu)
            gradient.copy_(numbers(group.rank, unit, turn, WORLD * size))
            part = scatter.allocate((size,), dtype=torch.float64, device=cpu)
            scatter(part, gradient, None, None)  # type: ignore[arg-type]
            if turn % 3 == 2:
                link.settle()
            found.append((whole, part))
        return found

    for rank, found in enumerate(together(WORLD, act)):
        for turn, (unit, (whole, part)) in enumerate(zip(order, found, strict=True)):
            size = SIZES[unit]
            assert torch.equal(whole, torch.cat([numbers(peer, unit, turn, size) for peer in range(WORLD)]))
            summed = [numbers(peer, unit, turn, WORLD * size) for peer in range(WORLD)]
            assert torch.equal(part, sum(summed)[rank * size : (rank + 1) * size])  # type: ignore[index]


def test_gradients_of_a_silent_rank_are_let_go_but_for_those_of_others() -> None:
    own, gradients = OwnGradients(["expert"]), {}
    for silent in (False, True):
        own.silent = silent
        for name in ("expert", "router"):
            parameter = torch.nn.Parameter(torch.ones(2))
            parameter.grad = torch.full((2,), torch.nan)
            own.note(name, parameter)
            gradients[name] = parameter.grad
        assert own.seen == {"expert"} | ({"router"} if not silent else set())
        assert (gradients["router"] is None) == silent
        assert gradients["expert"] is not None
        own.seen.clear()


def test_hosts_of_devices_meet_once_a_step_after_the_first() -> None:
    def act(group: ThreadCollective) -> list[int]:
        link, met, counts = link_of("devices", group), [0], []
        for name in ("barrier", "sum", "gather", "all_reduce"):
            original = getattr(group, name)

            def counted(*given: object, original: Callable[..., object] = original) -> object:
                met[0] += 1
                return original(*given)

            vars(group)[name] = counted
        for _ in range(3):
            for unit in (0, 1, 0):
                whole = torch.zeros(WORLD * SIZES[unit])
                link.gather(unit, whole, whole[: SIZES[unit]].clone())
            counts.append(met[0])
            link.settle()
            met[0] = 0
        return counts

    first, *others = zip(*together(WORLD, act), strict=True)
    assert min(first) >= 3
    assert others == [(0,) * WORLD] * 2


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([1], r"rank 0 gathers 'left', and rank 2 gathers 'right': all ranks gather a unit together"),
        ([0, 0], r"rank 0 has ended the step after 1 calls, and rank 2 gathers 'left': "),
        ([], r"rank 0 gathers 'left', and rank 2 has ended the step after 0 calls: "),
    ],
)
def test_a_rank_that_runs_other_units_after_the_first_step_is_named(calls: list[int], said: str) -> None:
    def act(group: ThreadCollective) -> None:
        carrier = ThreadCollective(ThreadGroup(1), 0)
        vars(carrier)["queued"] = True
        link = CollectiveLink(group, ("left", "right"), carrier, torch.device("cpu"))
        link.settle()
        for unit in calls if group.rank == 2 else [0]:
            # Among devices each gets wrong parameters, or all wait in vain: no host waits in it.
            link.gather(unit, torch.zeros(4), torch.zeros(4))
        link.settle()

    with pytest.raises(UsageError, match=said):
        together(WORLD, act)


@KINDS
def test_two_ranks_with_two_units_are_told_which(kind: str) -> None:
    def act(group: ThreadCollective) -> None:
        unit = int(group.rank == 2)
        whole = torch.zeros(WORLD * SIZES[unit])
        link_of(kind, group).gather(unit, whole, whole[: SIZES[unit]])

    with pytest.raises(
        UsageError, match=r"gathers '(body|head)' \(\d+ bytes\), and rank . gathers '(body|head)' \(\d+"
    ):
        together(WORLD, act)


def test_a_rank_that_is_elsewhere_is_told() -> None:
    def act(group: ThreadCollective) -> None:
        link = link_of("shared", group)
        if group.rank == 1:
            group.barrier()
        else:
            link.gather(0, torch.zeros(WORLD * 5), torch.zeros(5))

    with pytest.raises(UsageError, match=r"gathers 'body' .*, and rank 1 does something else: all ranks gather a unit"):
        together(WORLD, act)
