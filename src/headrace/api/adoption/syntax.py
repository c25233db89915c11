"""What a script's syntax tree says: which names a statement reads and sets, and which statements are needed."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterable, Iterator, Sequence

_SEEDS = {
    *("manual_seed", "manual_seed_all", "seed", "seed_all", "set_seed", "seed_everything", "set_default_dtype"),
    *("use_deterministic_algorithms", "set_float32_matmul_precision", "set_num_threads"),
}
"""Functions whose call changes what the following statements make."""
_SPEAKING = {
    *("print", "info", "debug", "warning", "log", "basicConfig", "pprint", "summary", "watch", "set_description"),
    *("set_postfix", "write", "flush", "add_scalar", "add_text", "add_graph", "add_image", "add_images", "mkdir"),
    *("makedirs", "save", "savefig", "warn", "error", "dump", "close", "show", "imshow"),
}
"""Functions that say something of their arguments and change none."""
_LIBRARIES = {"torch", "numpy", "np", "os", "json", "pickle", "logging", "wandb", "plt", "sys", "shutil"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DEFINITION = (*FUNCTION, ast.ClassDef, ast.Import, ast.ImportFrom)


def reads(node: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Returns the names that are read, in functions and classes within those that are not their own."""
    if not isinstance(node, ast.AST):
        return set().union(*map(reads, node))
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    if isinstance(node, ast.ClassDef):
        return reads([*node.bases, *(each.value for each in node.keywords), *node.decorator_list]) | reads(node.body)
    if isinstance(node, (*FUNCTION, ast.Lambda)):
        given = node.args
        own = {
            each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
        }
        body = node.body if isinstance(node.body, list) else [node.body]
        outer = [*given.defaults, *(each for each in given.kw_defaults if each), *getattr(node, "decorator_list", ())]
        return (reads(body) - own - sets(body)) | reads(outer)
    if isinstance(node, _COMPREHENSION):
        own = sets([each.target for each in node.generators])
        return set().union(*map(reads, ast.iter_child_nodes(node))) - own
    if isinstance(node, ast.AugAssign):
        return reads(node.value) | {root(node.target)} | reads(node.target)
    return set().union(*map(reads, ast.iter_child_nodes(node)))


def sets(node: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Returns the names that are bound outside of functions and classes within."""
    found: set[str] = set()
    for each in _walk(node, inside=False):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            found.add(each.id)
        elif isinstance(each, (*FUNCTION, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.ExceptHandler) and each.name:
            found.add(each.name)
    return found


def called(node: ast.Call) -> str:
    """Returns the last name of what is called: "step" of `a.b.step()`."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def root(node: ast.AST) -> str:
    """Returns the name that an expression begins with: "a" of `a.b[0].c()`; empty where there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def changes(statement: ast.stmt, names: set[str]) -> bool:
    """Tells whether a statement changes an object that has one of these names, or what random numbers come next."""
    if isinstance(statement, DEFINITION):
        return False
    for node in _walk(statement, inside=False):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store) and root(node) in names:
            return True
    if isinstance(statement, ast.Expr):
        call = statement.value
        if not isinstance(call, ast.Call):
            return isinstance(call, ast.Tuple) and any(changes(ast.Expr(each), names) for each in call.elts)
        if called(call) in _SEEDS:
            return True
        given = [*call.args, *(each.value for each in call.keywords)]
        own = root(call.func) in names
        if called(call) in _SPEAKING:
            return own and isinstance(call.func, ast.Attribute) and root(call.func) not in _LIBRARIES
        return own or bool(reads(given) & names)
    if isinstance(statement, ast.For) and reads(statement.iter) & names:
        names = names | sets(statement.target)
    return any(changes(each, names) for each in inner_statements(statement))


def inner_statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yields the statements directly within a compound one."""
    for field in ("body", "orelse", "finalbody"):
        yield from getattr(statement, field, ())
    for handler in getattr(statement, "handlers", ()):
        yield from handler.body


def needed(statements: Sequence[ast.stmt], names: set[str]) -> tuple[list[ast.stmt], set[str]]:
    """Returns the statements that make or change what these names mean, and all names that they need."""
    kept: list[ast.stmt] = []
    names = set(names)
    while True:
        before = len(kept)
        for statement in reversed(statements):
            if statement not in kept and (sets(statement) & names or changes(statement, names)):
                kept.append(statement)
                names |= reads(statement)
        if len(kept) == before:
            return [each for each in statements if each in kept], names


def text_of(statement: ast.AST) -> str:
    """Returns a statement or an expression as text."""
    return ast.unparse(ast.fix_missing_locations(statement))


def original(lines: Sequence[str], statement: ast.stmt) -> str:
    """Returns a statement as it stands in the script, without its indentation."""
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
    part = "\n".join(lines[first - 1 : statement.end_lineno])
    texts = [each for each in ast.walk(statement) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    several = any(each.lineno != each.end_lineno for each in texts)
    alone = not lines[first - 1][: statement.col_offset].strip()
    follows = lines[(statement.end_lineno or first) - 1][statement.end_col_offset :].strip()
    if (several and statement.col_offset) or not alone or (follows and not follows.startswith("#")):
        return text_of(statement)
    return textwrap.dedent(part) if not several else part


def _walk(node: ast.AST | Iterable[ast.AST], inside: bool = True) -> Iterator[ast.AST]:
    if not isinstance(node, ast.AST):
        for each in node:
            yield from _walk(each, inside)
        return
    yield node
    if inside or not isinstance(node, (*FUNCTION, ast.ClassDef, ast.Lambda, *_COMPREHENSION)):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, inside)
    elif isinstance(node, FUNCTION):
        for each in (*node.args.defaults, *node.decorator_list):
            yield from _walk(each, inside)


def replaced(node: ast.stmt, old: Sequence[ast.AST], new: ast.expr) -> ast.stmt:
    """Returns a copy of a statement with other expressions in the place of some."""

    class Put(ast.NodeTransformer):
        def visit(self, each: ast.AST) -> ast.AST:
            if any(_same_place(each, one) for one in old):
                return new
            return self.generic_visit(each)

    made = Put().visit(copy.deepcopy(node))
    assert isinstance(made, ast.stmt)
    return made


def _same_place(one: ast.AST, other: ast.AST) -> bool:
    places = [
        tuple(getattr(each, name, None) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"))
        for each in (one, other)
    ]
    return type(one) is type(other) and places[0] == places[1] and places[0][0] is not None
