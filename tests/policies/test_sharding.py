from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.policies import SHARDINGS
from headrace.policies.sharding import everywhere, slices, whole
from headrace.spec.model import ITEM_BYTES, ParameterSpec
from headrace.spec.plan import EVERY_WORKER, Segment


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=2), max_size=12))
    return [
        ParameterSpec(f"p{index}", tuple(shape), draw(st.sampled_from(sorted(ITEM_BYTES))), draw(st.booleans()))
        for index, shape in enumerate(shapes)
    ]


OWNERS = st.integers(1, 9)


def elements_by_owner(segments: Sequence[Segment]) -> Counter[int]:
    held: Counter[int] = Counter()
    for segment in segments:
        held[segment.owner] += segment.stop - segment.start
    return held


@pytest.mark.parametrize("name", sorted(SHARDINGS))
@given(parameters=parameter_lists(), owners=OWNERS)
def test_every_trainable_parameter_is_wholly_covered_once(
    name: str, parameters: list[ParameterSpec], owners: int
) -> None:
    segments = SHARDINGS[name](parameters, owners)
    pieces: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        pieces[segment.parameter].append(segment)
    trainable = [parameter for parameter in parameters if parameter.trainable]
    assert list(pieces) == [parameter.name for parameter in trainable]
    for parameter in trainable:
        covered = [(piece.start, piece.stop) for piece in pieces[parameter.name]]
        assert covered[0][0] == 0
        assert covered[-1][1] == parameter.elements
        assert all(before[1] == after[0] for before, after in pairwise(covered))
        assert all(start < stop for start, stop in covered) or parameter.elements == 0
    assert segments == SHARDINGS[name](parameters, owners)


@given(parameter_lists(), OWNERS)
def test_slices_are_contiguous_nearly_equal_and_cut_at_multiples_of_16(
    parameters: list[ParameterSpec], owners: int
) -> None:
    segments = slices(parameters, owners)
    held = elements_by_owner(segments)
    total = sum(held.values())
    given_out = [segment.owner for segment in segments]
    assert given_out == sorted(given_out)
    assert all(0 <= owner < owners for owner in given_out)
    line = 16 if total >= 16 * owners else 1
    assert all(abs(held[owner] * owners - total) <= line * owners for owner in range(owners))
    if line == 16:
        position = 0
        for before, after in pairwise(segments):
            position += before.stop - before.start
            assert before.owner == after.owner or position % 16 == 0
        assert all(held[owner] > 0 for owner in range(owners))


@given(st.integers(0, 40), OWNERS)
def test_few_elements_are_spread_to_within_one(count: int, owners: int) -> None:
    segments = slices([ParameterSpec("p", (count,))], owners)
    assert count == 0 or all(segment.start < segment.stop for segment in segments)
    held = elements_by_owner(segments)
    counts = [held[owner] for owner in range(owners)]
    assert count >= 16 * owners or max(counts) - min(counts) <= 1


def test_slices_drawn() -> None:
    # |  weight 64  | bias 8 |     out 56      |   128 elements among 2: the cut is in the middle, at 64
    parameters = [ParameterSpec("weight", (8, 8)), ParameterSpec("bias", (8,)), ParameterSpec("out", (56,))]
    assert slices(parameters, 2) == (
        Segment("weight", 0, 64, 0),
        Segment("bias", 0, 8, 1),
        Segment("out", 0, 56, 1),
    )
    # among 3: cuts near 42.7 and 85.3, so at 48 and 80
    assert slices(parameters, 3) == (
        Segment("weight", 0, 48, 0),
        Segment("weight", 48, 64, 1),
        Segment("bias", 0, 8, 1),
        Segment("out", 0, 8, 1),
        Segment("out", 8, 56, 2),
    )


@given(parameter_lists(), OWNERS)
def test_whole_parameters_have_one_owner_and_the_loads_are_even(parameters: list[ParameterSpec], owners: int) -> None:
    segments = whole(parameters, owners)
    assert len({segment.parameter for segment in segments}) == len(segments)
    sizes = {parameter.name: parameter.bytes for parameter in parameters}
    loads = [0] * owners
    for segment in segments:
        loads[segment.owner] += sizes[segment.parameter]
    # The last that the fullest owner took was given to it when it had the least.
    largest = max((sizes[segment.parameter] for segment in segments), default=0)
    assert max(loads) - min(loads) <= largest


def test_whole_puts_the_largest_first_by_bytes_not_by_elements() -> None:
    parameters = [
        ParameterSpec("half", (100,), "float16"),
        ParameterSpec("double", (40,), "float64"),
        ParameterSpec("single", (45,), "float32"),
    ]
    # 200, 320 and 180 bytes: the 320 alone, the others together
    assert {segment.parameter: segment.owner for segment in whole(parameters, 2)} == {
        "half": 1,
        "double": 0,
        "single": 1,
    }


def test_everywhere_belongs_to_every_worker() -> None:
    parameters = [ParameterSpec("a", (3, 2)), ParameterSpec("frozen", (5,), trainable=False)]
    assert everywhere(parameters) == everywhere(parameters, 4) == (Segment("a", 0, 6, EVERY_WORKER),)


@pytest.mark.parametrize("name", sorted(SHARDINGS))
def test_nobody_is_no_owner(name: str) -> None:
    with pytest.raises(UsageError, match="at least 1 owner, got 0"):
        SHARDINGS[name]([ParameterSpec("a", (3,))], 0)
