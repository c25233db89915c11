"""`headrace launch`: a plain script in several processes, or a script or a job on several hosts."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.combinations import refuse_idle
from headrace.cli.command import argument, command, option
from headrace.cli.engines import refuse_launcher
from headrace.cli.jobfile import check_file
from headrace.cli.options import ClusterOption, Distribution, DistributionOption, SshOption, default_run_dir, job_name
from headrace.cli.output import Answer
from headrace.errors import UnknownName, UsageError
from headrace.spec.cluster import Cluster

_EXAMPLES = """
  headrace launch train.py --workers 2
  headrace launch train.py --workers 2 --epochs 3     # the script gets --epochs
  headrace launch --workers 2 -- train.py --json      # and here --json, too
  headrace launch --hosts a,b,c job.py --strategy mirrored
"""


_TRAINING = {"setup", "fit", "launch", "compare"}
"""What a script calls that trains something."""
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)

OPTIONS = frozenset(
    ("--workers", "--hosts", "--cluster", "--port", "--distribution", "--ssh", "--python", "--keep-going", "--json")
)
"""Of `headrace launch`."""

COMMAND_LINE = ("-c", "from headrace.cli import main; main()")
"""Arguments of Python that are the command line."""


@command(_EXAMPLES)
def launch(
    answer: Answer,
    script: Annotated[Path, argument("SCRIPT.py", "A Python script that calls `headrace.setup`.")],
    arguments: Annotated[list[str] | None, argument("ARGUMENTS", "What the script finds in sys.argv.")] = None,
    workers: Annotated[
        int | None, option("--workers", "How many processes run it. Default: 2, or one a host.", min=1)
    ] = None,
    hosts: Annotated[str | None, option("--hosts A,B,...", "Runs it there, reached by ssh.")] = None,
    cluster: ClusterOption = None,
    port: Annotated[int, option("--port", "Of the first host, where all meet. 0: a free one.", min=0, max=65535)] = 0,
    distribution: DistributionOption = None,
    ssh: SshOption = "ssh",
    python: Annotated[str | None, option("--python PATH", "On all hosts. Default: this one.")] = None,
    keep_going: Annotated[bool, option("--keep-going", "With --hosts: the others go on when a host is lost.")] = False,
) -> None:
    """Run a plain script in several processes.

    The script calls `headrace.setup`, or has an Accelerator of headrace.accelerate. Its output goes where it would go
    alone (with --json to stderr); the exit code is the script's. With --hosts it runs on several hosts, and may also be
    a job file, which is trained: then the arguments are those of `headrace train`.
    """
    refuse_launcher("launch")
    if str(script).startswith("-"):
        raise UnknownName("option of headrace launch", str(script).partition("=")[0], OPTIONS)
    check_file(script, "script")
    given = tuple(arguments or ())
    with stdout_for_results(answer.as_json):
        if hosts or cluster:
            destinations = _destinations(hosts, cluster)
            workers = workers or len(destinations)
            trained = is_job(script)
            what = _training(script, given, cluster) if trained else (str(script), *given)
            usual = Distribution.CYCLIC if trained and has_backups(given) else Distribution.BLOCK
            chosen = distribution or usual
            code = over_ssh(destinations, what, script, workers, port, ssh, python, chosen, keep_going)
        else:
            refuse_idle(
                answer.given("--port", "--distribution", "--ssh", "--python", "--keep-going"),
                "for workers on several hosts; name these by --hosts or --cluster; what the script is to get stands "
                "behind --",
            )
            _refuse_job(script, given)
            # Lazily: --help need not wait for the engine.
            from headrace.engine.local.engine import launch_script

            workers = workers or 2
            code = launch_script(script, given, workers, answer.stream)
    # A process that a signal ended has a negative code; shells call it 128 + signal.
    code = 128 - code if code < 0 else code
    if answer.as_json:
        answer.document({"script": str(script), "workers": workers, "exit_code": code})
    raise typer.Exit(code)


def _refuse_job(script: Path, arguments: Sequence[str]) -> None:
    """Raises UsageError for a job file that as a script would end without having trained anything."""
    if is_job(script) and _only_defines(script):
        words = shlex.join(["headrace", "train", str(script), *arguments])
        raise UsageError(
            f"{script} defines a job, and as a script it trains nothing; train it on this machine by {words}, or name "
            "several hosts by --hosts or --cluster"
        )


def _only_defines(script: Path) -> bool:
    """Whether a script has definitions alone, and its own lines call nothing that trains."""
    module = ast.parse(script.read_text(encoding="utf-8"))
    called = [node.func for node in ast.walk(module) if isinstance(node, ast.Call)]
    names = {getattr(call, "attr", getattr(call, "id", "")) for call in called}
    # A docstring is a constant that stands alone.
    texts = [node for node in module.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    defines = all(isinstance(node, _DEFINITIONS) or node in texts for node in module.body)
    return defines and not names & _TRAINING


@contextlib.contextmanager
def stdout_for_results(keep_clean: bool) -> Iterator[None]:
    """Meanwhile processes inherit stderr as their stdout, where stdout must carry one document alone."""
    if not keep_clean:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def over_ssh(
    hosts: Sequence[tuple[str, str]],
    command: tuple[str, ...],
    script: Path,
    workers: int,
    port: int = 0,
    ssh: str = "ssh",
    python: str | None = None,
    distribution: Distribution = Distribution.BLOCK,
    keeps_going: bool = False,
) -> int:
    """Runs `python`, by default this one, on hosts, by (destination, name); returns the exit code."""
    # Lazily: --help need not wait for the engine.
    from headrace.engine.ssh.launcher import SshCommand, SshHost, launch_over_ssh

    if workers < len(hosts):
        raise UsageError(f"--workers {workers} on {len(hosts)} hosts: every host needs at least one")
    program = tuple(shlex.split(ssh))
    python = python or sys.executable
    wanted = SshCommand(command, script, workers, Path.cwd(), port, program, python, distribution, keeps_going)
    return launch_over_ssh([SshHost(*host) for host in hosts], wanted)


def hosts_of(cluster: Path) -> list[tuple[str, str]]:
    """Returns the address and the name of each host of a file."""
    return [(host.address or host.name, host.name) for host in Cluster.load(cluster).hosts]


def _destinations(text: str | None, cluster: Path | None) -> list[tuple[str, str]]:
    known = {name: address for address, name in hosts_of(cluster)} if cluster else {}
    if text is None:
        return [(address, name) for name, address in known.items()]
    names = text.split(",")
    if not all(names) or any(name.startswith("-") for name in names):
        raise UsageError(f"--hosts takes names or addresses with commas between them, got {text!r}")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--hosts names {name!r} {names.count(name)} times; once is enough, see --workers")
        if known and name not in known:
            raise UnknownName("host", name, known, str(cluster))
    return [(known[name], name) if known else (name, "") for name in names]


def is_job(script: Path) -> bool:
    """Whether a file defines `job`, so that it is trained and not run; it is not run to find out."""
    try:
        body = ast.parse(script.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError):
        return False  # Python says what is wrong with it
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return "job" in names


def has_backups(arguments: tuple[str, ...]) -> bool:
    """Whether the arguments of `headrace train` name a strategy whose servers have backups."""
    after = [value for option, value in itertools.pairwise(arguments) if option == "--strategy"]
    joined = [argument for argument in arguments if argument.startswith("--strategy=")]
    return any(re.search(r"\bbackups *= *[1-9]", text) for text in (*after, *joined))


def _training(script: Path, arguments: tuple[str, ...], cluster: Path | None) -> tuple[str, ...]:
    known = ("--cluster", str(cluster)) if cluster else ()
    # One name for all hosts, which may not begin in the same second.
    named = any(argument.split("=")[0] == "--run-dir" for argument in arguments)
    where = () if named else ("--run-dir", str(default_run_dir(job_name(script))))
    return (*COMMAND_LINE, "train", str(script), *arguments, *where, *known)


def separated(arguments: Sequence[str], name: str = "launch", options: Collection[str] = OPTIONS) -> list[str]:
    """Returns the arguments of a command with -- before a script that has options of the command's names.

    What stands behind such a script is the script's, if the command's own stand before it; a ValueError if none does.
    """
    words = list(arguments)
    place = next((index for index, word in enumerate(words) if word.endswith(".py") and _literals(word)), None)
    if place is None or "--" in words:
        return words
    behind = [word.split("=")[0] for word in words[place + 1 :]]
    both = [word for word in behind if word in options and word in _literals(words[place])]
    if not both:
        return words
    if any(word.split("=")[0] in options for word in words[:place]):
        return [*words[:place], "--", *words[place:]]
    example = ["headrace", name, "--workers", "2", *words[place:]]
    raise ValueError(
        f"{words[place]} has an option {both[0]} of its own, as headrace {name} has: write {name}'s before the script, "
        f"and what stands behind it is the script's, as in {shlex.join(example)}"
    )


def _literals(script: str) -> set[str]:
    """Returns the texts in a script; none where it cannot be read, which is said when it is run."""
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
