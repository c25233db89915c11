"""The rule that keeps devices in their table; see `house`."""

from __future__ import annotations

import ast
import re

from house import Modules, complaint, words

__all__ = ["device_names"]

BACKENDS = {"cuda", "gloo", "mps", "nccl", "tpu", "tpu_dist", "xccl", "xpu"}
NAMES_DEVICES = {
    # The table, and what only CUDA's runtime can do.
    "headrace.devices",
    # A strategy is called tpu; it names no device.
    "headrace.strategies.table",
    "headrace.strategies.tpu",
}


def device_names(modules: Modules) -> list[str]:
    """Only the device table names accelerators and backends; it has what differs between them."""
    found = []
    for module in modules.values():
        if module.name in NAMES_DEVICES:
            continue
        docs = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                named = BACKENDS & set(re.split(r"\W+", node.value))
            elif isinstance(node, ast.Attribute) and words(node.value) == ["torch"]:
                named = BACKENDS & {node.attr}
            else:
                continue
            found += [complaint(module, node.lineno, f"{name!r} is for devices.py alone") for name in sorted(named)]
    return found
