"""A job file to a Job, with an error that names the remedy before any process starts."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError, JobError, UnknownName, UsageError, user_place
from headrace.machine import disk
from headrace.machine.versions import require_torch
from headrace.spec.call import split_calls
from headrace.spec.job import Job, JobSource
from headrace.spec.options import Options

_FILE = re.compile(r"(?<![\w./-])[\w./-]+\.py(?=:)")
"""A file of a place, "mine.py" of "mine.py:Squares(1000)"."""
MODULE = "headrace_job"
"""The name of the job file's module in `sys.modules`, where its classes are looked up."""
_OPTIONS = "options."
"""How a setting begins that is for the job's Options."""
_OBJECTS = ("schedule", "early_stopping")
"""Fields of Options that no literal can give."""
_JOB, _NUMBERS = "job.", ("global_batch_size", "epochs", "steps", "seed")
"""The same for the Job itself, and its fields that a literal can give."""
_PARTS = ("callbacks", "data", "eval_data", "metrics")
"""Its fields that are named: by a place ("mine.py:Squares") or an entry point."""
_DATA, _WAYS = "data.", ("parallel", "cache", "prefetch")
"""The same for how the training data is read, and the arguments of `hr.data.read_by`."""


def load_job(path: Path, settings: Sequence[str] = ()) -> Job:
    """Runs a job file and returns its job.

    `settings` are "key=value" for the parameters of `job(...)`, "options.key=value" for the job's Options,
    "job.key=value" for numbers and parts of the Job itself, and "data.key=value" for how its training data is read.

    The file's definitions are sent to workers by value, so that workers need not find the file.

    Raises:
        JobError: the file cannot be loaded, or does not give a job.
        UsageError: a setting of the wrong form, or that is no parameter of `job(...)` and no field of these.
        HeadraceError: an error of headrace while the file ran, with a note of the line.
    """
    find_job(path)
    ours = {begin: [each for each in settings if each.strip().startswith(begin)] for begin in (_OPTIONS, _JOB, _DATA)}
    job = _job_of(path, _run_file(path), [each for each in settings if not any(each in of for of in ours.values())])
    options = [field.name for field in fields(Options) if field.name not in _OBJECTS]
    job = replace(job, options=replace(job.options, **_set(ours[_OPTIONS], _OPTIONS, options, "Options", job.options)))
    numbers = _set(ours[_JOB], _JOB, (*_NUMBERS, *_PARTS), "the job")
    numbers |= {name: _part(job, name, str(numbers[name])) for name in _PARTS if name in numbers}
    # One of them says how long a job is.
    numbers |= {other: None for one, other in (("steps", "epochs"), ("epochs", "steps")) if one in numbers}
    if ways := _set(ours[_DATA], _DATA, _WAYS, "reading the data"):
        # Lazily: other commands read a job's file and no data.
        from headrace.data import read_by

        numbers["data"] = read_by(numbers.get("data", job.data), **ways)
    return replace(job, **numbers, source=JobSource(str(path.resolve()), tuple(map(_from_anywhere, settings))))


def _part(job: Job, name: str, text: str) -> Any:
    # Lazily: most jobs have all their parts in their file.
    from headrace.cli.commands.extending.named import CALLBACKS, SOURCES, made, metrics

    if name == "metrics":
        return {**(job.metrics or {}), **metrics(text)}
    if name == "callbacks":
        return (*job.callbacks, *(made("callback", CALLBACKS, each) for each in split_calls(text)))
    return made("source of data", SOURCES, text, calls=True)


def _from_anywhere(setting: str) -> str:
    """Returns a setting with absolute paths: a command that reads the job again may run in another folder."""
    key, equals, text = setting.partition("=")
    if key.strip() not in {f"{_JOB}{name}" for name in _PARTS}:
        return setting
    return f"{key}{equals}{_FILE.sub(lambda found: str(Path(found[0]).resolve()), text)}"


def _job_of(path: Path, module: types.ModuleType, settings: Sequence[str]) -> Job:
    made = vars(module).get("job")
    if isinstance(made, Job):
        if settings:
            raise UsageError(
                f"--set {settings[0]}: `job` in {path} is a value and has no parameters; "
                + (_of_the_job(settings[0]) or "write `def job(lr=0.1): return hr.Job(...)` to set them")
            )
        return made
    if made is None:
        raise JobError(_defines_no_job(path, module))
    if not callable(made):
        raise JobError(f"`job` in {path} is {_kind(made)}; it must be a Job or a function that returns one")
    return _call(path, made, settings)


def _set(settings: Sequence[str], begin: str, known: Sequence[str], of: str, before: Any = None) -> dict[str, Any]:
    """Returns what settings that begin so say, by name.

    Args:
        known: the names that there are.
        of: whose they are, for an error.
        before: has the values so far, whose types the new ones have, unless they may be texts as well; None where they
            may have any.
    """
    values: dict[str, Any] = {}
    typed = {field.name for field in fields(before) if "str" not in str(field.type)} if before is not None else set()
    for setting in settings:
        key, text = _key_and_text(setting, values)
        name = key.removeprefix(begin)
        if name not in known:
            raise UnknownName("option" if before else "setting", name, known, of)
        values[key] = _value(key, text, getattr(before, name) if name in typed else None)
    return {key.removeprefix(begin): value for key, value in values.items()}


def find_job(path: Path) -> None:
    """Checks that a job file exists (else JobError), and puts its folder on `sys.path` for its imports.

    Call it before the engine is made, whose workers inherit the path: definitions of other files are sent by name.
    """
    check_file(path, "job file")
    require_torch()
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)


def check_file(path: Path, kind: str) -> None:
    """Raises JobError where a path is no file; the message names similar files."""
    if disk.is_folder(path):
        inside = ", ".join(sorted(file.name for file in path.glob("*.py"))) or "none"
        raise JobError(f"the {kind} {path} is a folder; name one of the Python files in it: {inside}")
    if disk.is_file(path):
        return
    if not disk.is_folder(path.parent):
        raise JobError(f"the {kind} {path} does not exist, nor does the folder {path.parent}")
    files = sorted(file.name for file in path.parent.glob("*.py"))
    near = difflib.get_close_matches(path.name, files, n=3)
    if near:
        hint = f"did you mean {' or '.join(str(path.parent / name) for name in near)}?"
    else:
        hint = f"Python files in that folder: {', '.join(files) or 'none'}"
    raise JobError(f"the {kind} {path} does not exist; {hint}")


def _run_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path.resolve())
    if spec is None or spec.loader is None:
        raise JobError(f"the job file {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Classes that the file defines look themselves up here while it runs.
    sys.modules[MODULE] = module
    loader = spec.loader
    try:
        _guarded(path, "when it was loaded", lambda: loader.exec_module(module))
    except HeadraceError:
        del sys.modules[MODULE]
        raise
    # Lazily: it imports torch, as the job has.
    from headrace.engine.shipping import ship_by_value

    ship_by_value(module)
    return module


def _call(path: Path, make: Callable[..., Any], settings: Sequence[str]) -> Job:
    values = _values(path, make, settings)
    made = _guarded(path, f"in job({', '.join(f'{k}={v!r}' for k, v in values.items())})", lambda: make(**values))
    if not isinstance(made, Job):
        raise JobError(f"job(...) in {path} returned {_kind(made)} and not a Job; end it with `return hr.Job(...)`")
    return made


def _guarded(path: Path, when: str, call: Callable[[], Any]) -> Any:
    """Runs user code and turns its exception into a JobError whose cause holds the user's frames."""
    try:
        return call()
    except HeadraceError as error:
        # Its class decides the exit code, so it stays what it is (ragged data: 5).
        error.add_note(f"at {user_place(error) or path}")
        raise
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        raise JobError(f"the job file {path} failed {when}: {cause}") from error


def _values(path: Path, make: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make).parameters
    except ValueError as error:
        raise JobError(f"`job` in {path} is {_kind(make)}; it must be a Job or a function") from error
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    values: dict[str, Any] = {}
    for setting in settings:
        key, text = _key_and_text(setting, values)
        if key not in named and not open_ended:
            raise UnknownName("parameter", key, named, f"job() in {path}", _of_the_job(setting))
        default = named[key].default if key in named else inspect.Parameter.empty
        values[key] = _value(key, text, default)
    missing = [name for name, it in named.items() if it.default is it.empty and name not in values]
    if missing:
        raise UsageError(f"job() in {path} needs {', '.join(missing)}; give --set {missing[0]}=...")
    return values


def _of_the_job(setting: str) -> str:
    """Returns how a setting is written that is the Job's; "" for another."""
    return f"write --set {_JOB}{setting}" if setting.partition("=")[0].strip() in (*_NUMBERS, *_PARTS) else ""


def _key_and_text(setting: str, before: Mapping[str, Any]) -> tuple[str, str]:
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UsageError(f"--set takes key=value, got {setting!r}")
    if key in before:
        raise UsageError(f"--set {key} is given twice")
    return key, text.strip()


def _value(key: str, text: str, default: Any) -> Any:
    """Reads a Python literal, and any other text as a string, by the type of the default."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # The parser raises the last two for hundreds of signs or brackets.
        value = text
    if isinstance(default, str) and value is not None:
        return value if isinstance(value, str) else text
    if isinstance(default, bool) and not isinstance(value, bool):
        raise UsageError(f"--set {key}={text}: give True or False (the default is {default})")
    if isinstance(default, int | float) and not isinstance(value, int | float | None):
        raise UsageError(f"--set {key}={text}: give a number (the default is {default})")
    if isinstance(default, float) and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise UsageError(f"--set {key}: give a number below 1e308, got one of {len(text)} digits") from error
    return value


def _defines_no_job(path: Path, module: types.ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (not isinstance(value, type | types.FunctionType) or value.__module__ == MODULE)
    ]
    jobs = [name for name in names if isinstance(vars(module)[name], Job)]
    near = jobs or [name for name in names if difflib.get_close_matches(name.lower(), ["job"])]
    hint = f"rename `{near[0]}` to `job`" if near else "end it with `job = hr.Job(...)`"
    return f"the job file {path} defines no `job`; it defines {', '.join(names) or 'nothing'}; {hint}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"[:120]
