"""Rules on their own: who may ask what a plan holds, and which strategy it is."""

from __future__ import annotations

import ast

from house import Module, Modules, complaint, room, words

ROOMS = {"api", "engine", "worker"}
"""They run any strategy, and ask for none of what only some plans have."""
OF_A_PLAN = {"backups", "partition", "servers", "stages"}
OF_ANYTHING = {"meetings", "portions"}
OF_A_ROLE = {"kind", "stage"}
BASES = {"Strategy", "ServedStrategy"}
LOOPS = "headrace.worker.loops."
"""Each is there for the strategies that train so."""
EXCEPTIONS = {"headrace.worker.server"}
"""Modules that still ask; the list only shrinks."""


def plan_questions(modules: Modules) -> list[str]:
    """Whether a plan has servers, stages, meetings or leases is asked in strategies/ and in the strategy's room."""
    asked = {
        module.name: _asked(module)
        for module in modules.values()
        if room(module.name) in ROOMS and not module.name.startswith(LOOPS)
    }
    found = [
        complaint(modules[name], node.lineno, f"asks for {ast.unparse(node)}")
        for name, nodes in asked.items()
        if name not in EXCEPTIONS
        for node in nodes
    ]
    return found + [
        f"{name} asks no longer: remove it from EXCEPTIONS" for name in sorted(EXCEPTIONS) if asked.get(name) == []
    ]


def strategy_questions(modules: Modules) -> list[str]:
    """Which strategy it is, is asked in strategies/ alone: other rooms read what a strategy says of itself."""
    kinds = {
        node.name
        for module in modules.values()
        if room(module.name) == "strategies"
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and any(BASES.intersection(words(base)) for base in node.bases)
    }
    return [
        complaint(module, node.lineno, f"asks whether it is {name}")
        for module in modules.values()
        if room(module.name) != "strategies"
        for node in module.nodes
        for name in sorted((kinds - BASES).intersection(_compared_classes(node)))
        if isinstance(node, ast.Call | ast.MatchClass)
    ]


def _compared_classes(node: ast.AST) -> list[str]:
    """Returns the names of the classes that an object is compared with."""
    if isinstance(node, ast.MatchClass):
        return words(node.cls)[-1:]
    if isinstance(node, ast.Call) and words(node.func) == ["isinstance"]:
        return [word for part in ast.walk(node.args[1]) for word in words(part)[-1:]]
    return []


def _asked(module: Module) -> list[ast.Attribute]:
    return [node for node in module.nodes if isinstance(node, ast.Attribute) and _asks(node)]


def _asks(node: ast.Attribute) -> bool:
    front = node.value.func if isinstance(node.value, ast.Call) else node.value
    of = (words(front) or [""])[-1].lstrip("_")
    return (
        node.attr in OF_ANYTHING
        or (of == "plan" and node.attr in OF_A_PLAN)
        or (of in ("role", "roles") and node.attr in OF_A_ROLE)
    )
