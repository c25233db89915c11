from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnknownName, UsageError
from headrace.policies.segments import evenly, everywhere, slices
from headrace.policies.sharding import (
    ParameterPiece,
    fixed_shards,
    max_size,
    min_size,
    parse_sharding,
    unsharded,
    whole,
)
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
SHARDINGS = {"evenly": evenly, "everywhere": everywhere, "slices": slices, "whole": whole}


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


def test_what_is_in_channels_last_order_is_cut_between_rows() -> None:
    # Rows of 27 elements: 108 among 2 would be cut at 48, and the nearest end of a row is 54.
    image = ParameterSpec("image", (4, 3, 3, 3), channels_last=True)
    assert slices([image], 2) == (Segment("image", 0, 54, 0), Segment("image", 54, 108, 1))
    assert slices([ParameterSpec("a", (27,)), image], 4) == (
        Segment("a", 0, 27, 0),
        Segment("image", 0, 27, 1),
        Segment("image", 27, 81, 2),
        Segment("image", 81, 108, 3),
    )
    # More owners than rows leave some without any.
    assert slices([replace(image, shape=(1, 3, 3, 3))], 2) == (Segment("image", 0, 27, 0),)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 4), max_size=6), OWNERS)
def test_rows_in_channels_last_order_stay_whole_and_all_are_covered(shapes: list[Any], owners: int) -> None:
    parameters = [ParameterSpec(f"p{index}", shape, channels_last=True) for index, shape in enumerate(shapes)]
    segments = slices(parameters, owners)
    for parameter in parameters:
        own = [segment for segment in segments if segment.parameter == parameter.name]
        assert [each.start for each in own] == [0, *(each.stop for each in own[:-1])]
        assert own[-1].stop == parameter.elements
        assert all(each.start * parameter.shape[0] % max(1, parameter.elements) == 0 for each in own)


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
def test_zero_owners_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="at least 1 owner, got 0"):
        SHARDINGS[name]([ParameterSpec("a", (3,))], 0)


WEIGHT = ParameterSpec("weight", (5, 4))
"""80 bytes in 5 rows of 16."""

COUNTS = st.integers(1, 50)
SIZES = st.integers(1, 4_000)

TEXTS = st.one_of(
    st.just("whole"),
    COUNTS.map(lambda count: f"fixed_shards:{count}"),
    SIZES.map(lambda size: f"max_size:{size}B"),
    st.tuples(SIZES, COUNTS).map(lambda least: f"min_size:{least[0]}B/{least[1]}"),
)


def rows_of(parameter: ParameterSpec) -> int:
    return parameter.shape[0] if parameter.shape else 1


def of_each(
    parameters: Sequence[ParameterSpec], pieces: Sequence[ParameterPiece]
) -> list[tuple[ParameterSpec, list[ParameterPiece]]]:
    """Returns the trainable parameters that have elements, each with its pieces."""
    return [
        (parameter, [piece for piece in pieces if piece.parameter == parameter.name])
        for parameter in parameters
        if parameter.trainable and parameter.elements
    ]


def row_counts(parameter: ParameterSpec, pieces: Sequence[ParameterPiece]) -> list[int]:
    row = parameter.elements // rows_of(parameter)
    assert all(piece.start % row == piece.stop % row == 0 for piece in pieces), "a row is cut"
    return [(piece.stop - piece.start) // row for piece in pieces]


@given(parameter_lists(), TEXTS)
def test_pieces_cover_what_is_trainable_once_in_its_order_and_by_nearly_equal_rows(
    parameters: list[ParameterSpec], text: str
) -> None:
    pieces = parse_sharding(text)(parameters)
    assert pieces == parse_sharding(text)(parameters)
    trainable = [parameter for parameter in parameters if parameter.trainable]
    assert list(dict.fromkeys(piece.parameter for piece in pieces)) == [parameter.name for parameter in trainable]
    for before, after in pairwise(pieces):
        assert after.start == (before.stop if before.parameter == after.parameter else 0)
    for parameter in trainable:
        own = [piece for piece in pieces if piece.parameter == parameter.name]
        assert (own[0].start, own[-1].stop) == (0, parameter.elements)
        assert sum(piece.bytes for piece in own) == parameter.bytes
        assert all(piece.start < piece.stop for piece in own) or (parameter.elements == 0 and len(own) == 1)
    for parameter, own in of_each(parameters, pieces):
        counts = row_counts(parameter, own)
        assert max(counts) - min(counts) <= 1


@given(parameter_lists(), COUNTS)
def test_fixed_shards_are_so_many_or_one_a_row(parameters: list[ParameterSpec], count: int) -> None:
    for parameter, own in of_each(parameters, fixed_shards(parameters, count)):
        assert len(own) == min(count, rows_of(parameter))


@given(parameter_lists(), COUNTS, SIZES)
def test_min_size_is_reached_and_one_piece_more_would_not_reach_it(
    parameters: list[ParameterSpec], count: int, least: int
) -> None:
    for parameter, own in of_each(parameters, min_size(parameters, count, least)):
        assert len(own) <= count
        assert len(own) == 1 or min(piece.bytes for piece in own) >= least
        finer = [piece for piece in fixed_shards([parameter], len(own) + 1) if piece.bytes < least]
        assert len(own) in (count, rows_of(parameter)) or finer


@given(parameter_lists(), SIZES)
def test_max_size_is_kept_and_one_piece_less_would_not_keep_it(parameters: list[ParameterSpec], most: int) -> None:
    for parameter, own in of_each(parameters, max_size(parameters, most)):
        assert max(piece.bytes for piece in own) <= max(most, parameter.bytes // rows_of(parameter))
        if len(own) > 1:
            assert max(piece.bytes for piece in fixed_shards([parameter], len(own) - 1)) > most


def test_the_drawn_cuts() -> None:
    def lengths(text: str) -> list[int]:
        return [piece.bytes // 16 for piece in parse_sharding(text)([WEIGHT])]

    assert lengths("fixed_shards:2") == lengths("min_size:32B/8") == [2, 3]
    assert lengths("max_size:32B") == [1, 2, 2]
    assert lengths("whole") == [5]
    assert lengths("min_size:1B/3") == lengths("fixed_shards:3")
    assert lengths("fixed_shards:9") == lengths("max_size:1B") == [1] * 5


def test_frozen_parameters_have_no_piece_and_scalars_one() -> None:
    parameters = [ParameterSpec("frozen", (9,), trainable=False), ParameterSpec("scale", (), "float64")]
    for sharding in ("whole", "fixed_shards:4", "max_size:1B", "min_size:1B/4"):
        assert parse_sharding(sharding)(parameters) == (ParameterPiece("scale", 0, 1, 8),)


def test_units_are_by_thousands_unless_they_say_otherwise() -> None:
    (parameter,) = parameters = [ParameterSpec("p", (1 << 20,), "uint8")]
    assert len(parse_sharding("max_size:1MB")(parameters)) == 2
    assert len(parse_sharding("max_size:1MiB")(parameters)) == 1
    assert parse_sharding("max_size:1 kB")(parameters) == max_size(parameters, 1_000)
    assert parse_sharding("min_size:4KiB/64")(parameters) == min_size(parameters, 64, 4_096)
    assert parse_sharding("max_size:1GB")([parameter]) == parse_sharding("max_size:1GiB")([parameter])
    assert parse_sharding("whole")(parameters) == unsharded(parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_size", "'' is no whole number of at least 1 with a unit, one of B, kB, .*; write it as 'max_size:4MB'"),
        ("max_size:4", "'4' is no whole number of at least 1 with a unit"),
        ("max_size:0MB", "'0MB' is no whole number"),
        ("max_size:-4MB", "'-4MB' is no whole number"),
        ("max_size:1.5MB", r"'1\.5MB' is no whole number"),
        ("max_size:٤MB", "'٤MB' is no whole number"),
        ("max_size:4mb", "there is no unit 'mb'; did you mean 'MB'"),
        ("max_size:4TB", "there is no unit 'TB'; known: B, kB, MB"),
        ("max_size:" + "9" * 5_000 + "B", "is no whole number"),
        ("fixed_shards", "'' is no number of pieces of at least 1; write it as 'fixed_shards:4'"),
        ("fixed_shards:0", "'0' is no number of pieces"),
        ("fixed_shards:٤", "'٤' is no number of pieces"),
        ("fixed_shards:²", "'²' is no number of pieces"),
        ("fixed_shards:" + "9" * 5_000, "is no number of pieces"),
        ("min_size:256kB", "'' is no number of pieces of at least 1; write it as 'min_size:256kB/8'"),
        ("min_size:8/256kB", "'256kB' is no number of pieces"),
        ("whole:4", "takes nothing, got 'whole:4'"),
    ],
)
def test_a_text_that_is_not_understood_is_answered_with_one_that_is(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_sharding(text)


@pytest.mark.parametrize("text", ["maxsize:4MB", "max-size:4MB", "Max_Size:4MB"])
def test_an_unknown_sharding_suggests_the_nearest(text: str) -> None:
    with pytest.raises(UnknownName, match="did you mean 'max_size'"):
        parse_sharding(text)


def test_a_sharding_is_a_text() -> None:
    with pytest.raises(UsageError, match="a sharding is a text as 'max_size:4MB', got 4"):
        parse_sharding(4)  # type: ignore[arg-type]


def test_pieces_need_a_number_and_a_size() -> None:
    with pytest.raises(UsageError, match="count must be at least 1, got 0"):
        fixed_shards([WEIGHT], 0)
    with pytest.raises(UsageError, match="count must be at least 1, got -1"):
        min_size([WEIGHT], -1, 4)
    with pytest.raises(UsageError, match="least_bytes must be at least 1, got 0"):
        min_size([WEIGHT], 1, 0)
    with pytest.raises(UsageError, match="most_bytes must be at least 1, got 0"):
        max_size([WEIGHT], 0)
