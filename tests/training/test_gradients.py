"""Which gradients exist, and where they go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.spec.model import ParameterSpec
from headrace.training.gradients import FlatGradients, FlatLayout, UsedParameters, assign

SPECS = [
    ParameterSpec("a", (2, 3)),
    ParameterSpec("b", (4,), "float64"),
    ParameterSpec("c", ()),
    ParameterSpec("d", (0,)),
]


@pytest.mark.slow
@given(
    st.integers(1, 4).flatmap(
        lambda world: st.lists(  # by round
            st.lists(st.none() | st.lists(st.booleans(), min_size=3, max_size=3), min_size=world, max_size=world),
            min_size=1,
            max_size=5,
        )
    )
)
def test_missing_is_what_nobody_has(rounds: list[list[list[bool] | None]]) -> None:
    """A round says for each worker which of three gradients it has, or None where its share is empty."""
    world = len(rounds[0])

    def act(host: ThreadCollective) -> list[tuple[int, ...]]:
        presence = UsedParameters(host, 3)
        found = []
        for has in rounds:
            own = has[host.rank]
            if own is None:
                presence.publish_nothing()
            else:
                assert presence.publish([torch.ones(1) if there else None for there in own]) == all(own)
            found.append(presence.settle())
            host.barrier()
        return found

    expected = [
        tuple(index for index in range(3) if not any(own is not None and own[index] for own in has)) for has in rounds
    ]
    assert together(world, act) == [expected] * world


def flat() -> tuple[FlatGradients, tuple[Tensor, ...], UsedParameters]:
    layout = FlatLayout(SPECS)
    region = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    presence = UsedParameters(ThreadCollective(ThreadGroup(1), 0), len(SPECS))
    return FlatGradients(layout, region, presence), layout.views(region), presence


def some() -> list[Tensor | None]:
    # Strided and expanded, as autograd gives them.
    return [
        torch.arange(6.0).view(3, 2).t(),
        torch.ones(1, dtype=torch.float64).expand(4),
        torch.tensor(7.0),
        torch.zeros(0),
    ]


@pytest.mark.parametrize("missing", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_gradients_come_to_their_places(missing: tuple[int, ...]) -> None:
    sink, views, presence = flat()
    sink.store(some())
    sink.store([None if index in missing else gradient for index, gradient in enumerate(some())])
    for index, (view, gradient) in enumerate(zip(views, some(), strict=True)):
        assert gradient is not None
        assert torch.equal(view, torch.zeros_like(gradient) if index in missing else gradient)
    assert presence.settle() == missing


def test_nothing_is_zeros() -> None:
    sink, views, presence = flat()
    sink.store_nothing()
    assert not any(view.any() for view in views)
    assert presence.settle() == (0, 1, 2, 3)


def test_the_optimizer_sees_views_but_of_what_is_missing() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    views = [torch.ones(2) for _ in range(3)]
    assign(parameters, views, (0, 2))
    assert [parameter.grad for parameter in parameters] == [None, views[1], None]
    assign(parameters, views, ())
    assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))
