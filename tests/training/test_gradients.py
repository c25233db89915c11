"""Which gradients exist, and where they go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.spec.model import ITEM_BYTES, ParameterSpec
from headrace.training.gradients import ByteRange, FlatGradients, FlatLayout, UsedParameters, assign

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
def test_missing_is_what_no_rank_has(rounds: list[list[list[bool] | None]]) -> None:
    """A round says for each worker which of three gradients it has, or None where its share is empty."""
    world = len(rounds[0])

    def act(host: ThreadCollective) -> list[tuple[int, ...]]:
        used = UsedParameters(host, 3)
        found = []
        for has in rounds:
            own = has[host.rank]
            if own is None:
                used.publish_nothing()
            else:
                assert used.publish([torch.ones(1) if there else None for there in own]) == all(own)
            found.append(used.settle())
            host.barrier()
        return found

    expected = [
        tuple(index for index in range(3) if not any(own is not None and own[index] for own in has)) for has in rounds
    ]
    assert together(world, act) == [expected] * world


def test_a_place_lies_in_the_order_of_its_parameter() -> None:
    specs = [ParameterSpec("a", (3,)), ParameterSpec("image", (2, 3, 4, 5), channels_last=True)]
    layout = FlatLayout(specs)
    region = torch.zeros(layout.nbytes, dtype=torch.uint8)
    _, view = layout.views(region)
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert view.stride() == image.stride()
    view.copy_(image)
    assert torch.equal(layout.flat(region, "image"), image.permute(0, 2, 3, 1).flatten())


def flat() -> tuple[FlatGradients, tuple[Tensor, ...], UsedParameters]:
    layout = FlatLayout(SPECS)
    region = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    used = UsedParameters(ThreadCollective(ThreadGroup(1), 0), len(SPECS))
    return FlatGradients(layout, region, used), layout.views(region), used


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
    sink, views, used = flat()
    sink.store(some())
    sink.store([None if index in missing else gradient for index, gradient in enumerate(some())])
    for index, (view, gradient) in enumerate(zip(views, some(), strict=True)):
        assert gradient is not None
        assert torch.equal(view, torch.zeros_like(gradient) if index in missing else gradient)
    assert used.settle() == missing


@pytest.mark.parametrize("missing", [None, 1])
def test_what_is_in_its_place_stays_there(missing: int | None) -> None:
    sink, views, _ = flat()
    gradients: list[Tensor | None] = list(some())
    place = sink.place(0)
    gradients[0] = place.fill_(3.0)
    if missing is not None:
        gradients[missing] = None
    sink.store(gradients)
    assert torch.equal(views[0], torch.full((2, 3), 3.0))
    assert torch.equal(views[2], torch.tensor(7.0))
    assert place.data_ptr() == views[0].data_ptr()


def test_nothing_is_zeros() -> None:
    sink, views, used = flat()
    sink.store_nothing()
    assert not any(view.any() for view in views)
    assert used.settle() == (0, 1, 2, 3)


def test_the_optimizer_sees_views_but_of_what_is_missing() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    views = [torch.ones(2) for _ in range(3)]
    assign(parameters, views, (0, 2))
    assert [parameter.grad for parameter in parameters] == [None, views[1], None]
    assign(parameters, views, ())
    assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))


LINE = 64


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=10))
    return [
        ParameterSpec(f"p{i}", tuple(shape), draw(st.sampled_from(sorted(ITEM_BYTES))))
        for i, shape in enumerate(shapes)
    ]


def marked(layout: FlatLayout) -> torch.Tensor:
    return torch.zeros(layout.nbytes, dtype=torch.uint8)


@given(parameters=parameter_lists())
def test_every_parameter_has_a_place_of_its_own(parameters: list[ParameterSpec]) -> None:
    layout = FlatLayout(parameters)
    region = marked(layout)
    views = layout.views(region)
    assert [tuple(view.shape) for view in views] == [parameter.shape for parameter in parameters]
    assert [view.dtype for view in views] == [getattr(torch, parameter.dtype) for parameter in parameters]
    for view in views:
        # Every byte is counted by its holder; two holders would make it 2.
        flat = view.reshape(-1).view(torch.uint8)
        assert flat.data_ptr() % LINE == region.data_ptr() % LINE or not flat.numel()
        flat += 1
    assert int(region.sum()) == sum(parameter.bytes for parameter in parameters)
    assert bool((region <= 1).all())


@given(parameters=parameter_lists())
def test_a_place_is_where_views_and_flat_both_say(parameters: list[ParameterSpec]) -> None:
    layout = FlatLayout(parameters)
    region = marked(layout)
    for view, parameter in zip(layout.views(region), parameters, strict=True):
        flat = layout.flat(region, parameter.name)
        assert flat.numel() == parameter.elements
        assert flat.data_ptr() == view.data_ptr()


@given(parameters=parameter_lists())
def test_spans_cover_everything_once_and_hold_one_type(parameters: list[ParameterSpec]) -> None:
    layout = FlatLayout(parameters)
    ends = [0, *[span.stop for span in layout.spans]]
    assert [span.start for span in layout.spans] == ends[:-1]
    assert ends[-1] == layout.nbytes
    assert [span.dtype for span in layout.spans] == [
        getattr(torch, dtype) for dtype in dict.fromkeys(parameter.dtype for parameter in parameters)
    ]
    region = marked(layout)
    for span in layout.spans:
        span.of(region).view(torch.uint8).fill_(ends.index(span.stop, 1))
    for parameter in parameters:
        (number,) = [i for i, span in enumerate(layout.spans, 1) if span.dtype is getattr(torch, parameter.dtype)]
        place = layout.flat(region, parameter.name).view(torch.uint8)
        assert bool((place == ends.index(ends[number], 1)).all())


@given(parameters=parameter_lists(), world=st.integers(1, 9))
def test_parts_cover_a_span_once_and_are_cut_at_cache_lines(parameters: list[ParameterSpec], world: int) -> None:
    for span in FlatLayout(parameters).spans:
        parts = [span.part(rank, world) for rank in range(world)]
        ends = [span.start, *[part.stop for part in parts]]
        assert [part.start for part in parts] == ends[:-1]
        assert ends[-1] == span.stop
        assert all((part.start - span.start) % LINE == 0 and part.dtype is span.dtype for part in parts)
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= LINE


@given(length=st.integers(0, 2_000), world=st.integers(1, 9), start=st.integers(0, 5))
def test_a_span_that_ends_within_a_line_is_covered_too(length: int, world: int, start: int) -> None:
    span = ByteRange(torch.uint8, start * LINE, start * LINE + length)
    parts = [span.part(rank, world) for rank in range(world)]
    assert sum(part.stop - part.start for part in parts) == length
    assert all(span.start <= part.start <= part.stop <= span.stop for part in parts)


@given(parameters=parameter_lists(), data=st.data())
def test_runs_hold_the_chosen_parameters_and_no_other(parameters: list[ParameterSpec], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(parameters)))
    start = data.draw(st.integers(0, stop))
    layout = FlatLayout(parameters)
    region = marked(layout)
    runs = layout.runs(region, start, stop)
    assert len(runs) == len({parameter.dtype for parameter in parameters[start:stop]})
    for run in runs:
        run.view(torch.uint8).add_(1)
    for index, view in enumerate(layout.views(region)):
        assert bool((view.reshape(-1).view(torch.uint8) == int(start <= index < stop)).all())
