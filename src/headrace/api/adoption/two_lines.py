"""A script with the two lines that make it one worker of many."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from headrace.api.adoption.facts import Facts
from headrace.api.adoption.loop import LoopScope, Unfit, find_scopes, trains
from headrace.api.adoption.syntax import called, root, sets, text_of

IMPORT = "import headrace as hr"


def write_setup(source: str, facts: Facts, summed: bool = False) -> str:
    """Returns the script with `hr.setup` before its loop; files that it saves are written by the first process.

    Args:
        summed: the loss of a batch is a sum over its examples.

    Raises:
        Unfit: there is no line where what is trained has names, and that runs once.
    """
    tree, lines = ast.parse(source), source.splitlines()
    scopes = find_scopes(tree, facts)
    scope, statement = _place(tree, scopes, facts)
    names = scope.frame.names
    indent = " " * statement.col_offset
    loader, more = names.get("loader"), ', reduction="sum"' if summed else ""
    calls = []
    for number in range(facts.optimizers):
        end = f" {number}" * bool(number)
        model, optimizer = names[f"model{end}"], names[f"optimizer{end}"]
        bound = loader if loader and not number else "_"
        calls.append(f"{indent}{model}, {optimizer}, {bound} = hr.setup({model}, {optimizer}, {loader}{more})")
    added: dict[int, list[str]] = {statement.lineno - 1: calls}
    if IMPORT not in lines:
        added.setdefault(_after_imports(tree), []).insert(0, IMPORT)
    saves = {each.lineno - 1: _saved(lines, each) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    made = []
    for place, line in enumerate(lines):
        made += [*added.get(place, ()), saves.get(place) or line]
    return "\n".join([*made, *added.get(len(lines), ())]) + "\n"


def _place(tree: ast.Module, scopes: Sequence[LoopScope], facts: Facts) -> tuple[LoopScope, ast.stmt]:
    """Returns the outermost function that knows all that is trained, and the statement before which it is set up."""
    wanted = {
        f"{role}{f' {number}' * bool(number)}" for number in range(facts.optimizers) for role in ("model", "optimizer")
    }
    wanted |= {"loader"} if facts.loop_line else set()
    for place, scope in enumerate(scopes):
        if wanted - scope.frame.names.keys():
            continue
        if any(each.loops for each in scopes[:place]):
            break
        statement = scope.loops[0] if scope.loops else scope.on
        assert statement is not None
        inside = set[str]().union(*(sets(each) for each in (*scope.within, *scope.loops)))
        for role in sorted(wanted):
            name = scope.frame.names[role]
            if root(ast.parse(name, mode="eval").body) in inside:
                raise Unfit(
                    f"line {statement.lineno}: {name} is made anew in the loop, and hr.setup is called once for each"
                )
        for each in (one for inner in scopes[place:] for one in inner.after):
            if trains(each, tree):
                raise Unfit(f"line {each.lineno} trains once more, which is not seen: {text_of(each).splitlines()[0]}")
        return scope, statement
    missing = sorted(wanted - set().union(*(scope.frame.names for scope in scopes)))
    what = f"nothing names the {missing[0]}" if missing else "no function that runs once has all"
    raise Unfit(f"{what}: write hr.setup(model, optimizer, loader) where these are made")


def _after_imports(tree: ast.Module) -> int:
    """Returns the line behind the imports at the script's top."""
    line = 0
    for each in tree.body:
        if isinstance(each, ast.Import | ast.ImportFrom):
            line = each.end_lineno or line
        elif not isinstance(each, ast.Expr):
            break
    return line


def _saved(lines: Sequence[str], statement: ast.Expr) -> str:
    """Returns the line of a statement that saves a file, for the first process; empty where it is another."""
    call = statement.value
    if not isinstance(call, ast.Call) or called(call) not in ("save", "save_pretrained"):
        return ""
    line = lines[statement.lineno - 1]
    whole = statement.lineno == statement.end_lineno and not line[: statement.col_offset].strip()
    if not whole or (text_of(call.func) != "torch.save" and called(call) != "save_pretrained"):
        return ""
    given = [*map(text_of, call.args), *(text_of(each) for each in call.keywords)]
    return f"{line[: statement.col_offset]}hr.processes().on_first({', '.join([text_of(call.func), *given])})"
