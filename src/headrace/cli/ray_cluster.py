"""`--cluster ray://auto` and what belongs to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace.cli.command import option
from headrace.cli.engines import refuse_launcher
from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.engine.ray.engine import RayEngine

_RAY = "ray://"


class Placement(StrEnum):
    """How Ray places workers over nodes."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


RuntimeEnvOption = Annotated[
    str | None,
    option(
        "--runtime-env FILE|JSON", "Packages and files that the nodes of a Ray cluster need, as Ray describes them."
    ),
]
ResourcesOption = Annotated[
    str | None, option("--resources JSON", "What each worker reserves of Ray's resources besides its CPU or GPU.")
]
PlacementOption = Annotated[
    Placement | None, option("--placement", "How Ray places the workers over nodes.", case_sensitive=False)
]


def is_ray(cluster: str | None) -> bool:
    """Tells whether `--cluster` names a Ray cluster and no file."""
    return cluster is not None and cluster.startswith(_RAY)


def ray_engine(
    cluster: str | None,
    secret_file: Path | None = None,
    runtime_env: str | None = None,
    resources: str | None = None,
    placement: Placement | None = None,
) -> RayEngine | None:
    """Returns the engine of the Ray cluster that `--cluster` names, None if it names a file or nothing.

    Raises:
        UsageError: an option does not fit the other ones, or cannot be read.
    """
    if cluster is None or not is_ray(cluster):
        for name, value in (("runtime-env", runtime_env), ("resources", resources), ("placement", placement)):
            if value is not None:
                raise UsageError(f"--{name} is for a Ray cluster; say which by --cluster ray://auto, or leave it out")
        return None
    refuse_launcher(f"train --cluster {cluster}")
    if secret_file is not None:
        raise UsageError(f"--cluster {cluster} makes a secret of its own for each run; leave out --secret-file")
    # Lazily: it is not always installed.
    from headrace.engine.ray.engine import RayEngine

    wanted = _mapping("resources", resources)
    for name, amount in wanted.items():
        if not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise UsageError(f"--resources gives each name a number above 0, got {name!r}: {amount!r}")
    env = runtime_env
    if env is not None and not env.lstrip().startswith("{"):
        env = _content(Path(env))
    return RayEngine(
        cluster,
        runtime_env=_mapping("runtime-env", env) or None,
        resources=wanted,
        placement=placement.value if placement else None,
    )


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--runtime-env {path} is no file of JSON that can be read: {error}") from error


def _mapping(option_name: str, text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--{option_name} is no JSON: {error}, in {text[:80]!r}") from error
    if not isinstance(value, dict):
        raise UsageError(f'--{option_name} is an object of JSON, {{"name": ...}}, got {text[:80]!r}')
    return value
