"""How large the package is, and how much of it each public entry loads."""

from __future__ import annotations

from house import PACKAGE, Modules

LINES = 132_560
"""Of the whole package. What adds lines takes lines away elsewhere, or says in the changelog why it is worth them."""

CORE = 15_036
"""Of the files that docs/architecture.md names as the core."""

CLOSURES = {
    "data": 960,
    "data.loading.loader": 6_850,
    "strategies.one_device": 10_260,
    "strategies.mirrored": 11_460,
    "strategies.central_storage": 13_530,
    "worker.main": 21_120,
    "engine.local.process": 22_820,
    "parameter_server.core.shard": 1_280,
    "serving.application": 4_170,
    "api.fit": 34_560,
}
"""Lines that importing a module loads: its own, and those of all modules of ours that it imports."""


def size(modules: Modules) -> list[str]:
    """The package has no more lines than its budget."""
    lines = sum(module.lines for module in modules.values())
    return [f"{lines:,} lines, at most {LINES:,}"] if lines > LINES else []


def closures(modules: Modules) -> list[str]:
    """Importing an entry loads no more lines than its budget."""
    found = []
    for name, most in CLOSURES.items():
        if f"{PACKAGE}.{name}" in modules:
            lines = sum(modules[each].lines for each in closure(modules, f"{PACKAGE}.{name}"))
            found += [f"{name} loads {lines:,} lines, at most {most:,}"] if lines > most else []
    return found


def closure(modules: Modules, entry: str) -> set[str]:
    """Returns the modules that importing one loads, with the packages that they are in."""
    loaded: set[str] = set()
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in modules:
            continue
        loaded.add(name)
        parts = name.split(".")
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
        waiting += [item.target for item in modules[name].imports if item.when == "top"]
        # `from package import module` loads the package, too.
        waiting += [item.target.rpartition(".")[0] for item in modules[name].imports if item.when == "top"]
    return loaded
