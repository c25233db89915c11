"""The module path and the environment variables that workers take from the process that launches them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any


def set_since(before: Mapping[str, str]) -> dict[str, Any]:
    """Returns the module path, and the environment variables that this process has set or removed since `before`."""
    now = dict(os.environ)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return {"path": sys.path, "variables": {name: now.get(name) for name in names}}


def take_environment(request: Mapping[str, Any]) -> None:
    """Takes over what `set_since` returned in the launcher."""
    sys.path[:] = request["path"]
    for name, value in request["variables"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
