import pytest

from headrace.cli.options import (
    check_strategies,
    complete_strategies,
    complete_strategy,
    split_names,
    strategy_names,
)
from headrace.errors import UnknownName, UsageError


@pytest.mark.slow
def test_the_names_read_from_the_source_are_those_of_the_dict() -> None:
    from headrace.strategies import SHORT_NAMES, STRATEGIES

    assert strategy_names() == tuple(sorted([*STRATEGIES, *SHORT_NAMES]))


def test_names_complete() -> None:
    assert {"central_storage", "mirrored", "one_device"} <= set(complete_strategy(""))
    assert complete_strategy("mirr") == ["mirrored"]
    assert complete_strategy("x") == []


def test_lists_of_names_complete_without_what_is_taken() -> None:
    assert complete_strategies("one_device,mir") == ["one_device,mirrored"]
    assert "mirrored,mirrored" not in complete_strategies("mirrored,")
    assert "mirrored,one_device" in complete_strategies("mirrored,")


def test_an_unknown_strategy_is_refused_with_a_suggestion() -> None:
    check_strategies(["mirrored", "one_device", "diloco(period=50)", "easgd", "local_sgd"])
    with pytest.raises(UnknownName, match="no strategy 'mirored'; did you mean 'mirrored'"):
        check_strategies(["one_device", "mirored"])


def test_lists_of_names() -> None:
    assert split_names("one_device, mirrored") == ("one_device", "mirrored")
    with pytest.raises(UsageError, match="with commas between"):
        split_names("one_device,,mirrored")
    with pytest.raises(UsageError, match="names 'mirrored' 2 times"):
        split_names("mirrored,mirrored")
