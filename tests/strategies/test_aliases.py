"""Names of other systems' strategies."""

from __future__ import annotations

import pytest

from headrace.errors import UnknownName
from headrace.strategies import resolve
from headrace.strategies.table import STRATEGIES


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ddp", "mirrored"),
        ("DDP", "mirrored"),
        ("DistributedDataParallel", "mirrored"),
        ("MirroredStrategy", "mirrored"),
        ("MultiWorkerMirroredStrategy", "multi_worker_mirrored"),
        ("CentralStorageStrategy", "central_storage"),
        ("ParameterServerStrategy", "parameter_server"),
        ("TPUStrategy", "tpu"),
        ("fsdp", "fully_sharded"),
        ("FSDP2", "fully_sharded"),
        ("zero3", "fully_sharded"),
        ("deepspeed", "fully_sharded"),
        ("gpipe", "pipeline"),
        ("tp", "tensor_parallel"),
    ],
)
def test_another_systems_name_is_told_apart(name: str, ours: str) -> None:
    with pytest.raises(UnknownName, match=f"there is no strategy '{name}'; `{name}` is `{ours}` here; known: "):
        resolve(name)


def test_every_name_is_one_of_ours() -> None:
    from headrace.strategies.table import _ELSEWHERE

    assert set(_ELSEWHERE.values()) <= set(STRATEGIES)


def test_a_slip_is_still_a_slip() -> None:
    with pytest.raises(UnknownName, match="did you mean 'mirrored'"):
        resolve("miror")
