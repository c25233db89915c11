"""`headrace watch`: a page of runs as they happen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import JsonOption, help_option, option
from headrace.cli.output import answering
from headrace.web.access import check_access, is_loopback, read_token

_EXAMPLES = """
  headrace watch runs/a
  headrace watch runs --port 9000
  headrace watch runs/a --host 0.0.0.0 --token-file token
"""
_TOKEN = "HEADRACE_WATCH_TOKEN"


def watch(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            show_default=False,
            help="Directories of runs or comparisons, or directories that hold such ones.",
        ),
    ],
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for a free one.")] = 8010,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            metavar="FILE",
            help=f"The page asks for the token in this file of mode 600; or for that in {_TOKEN}.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Other machines may look without a token.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="A directory need not hold a run yet.")] = False,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Show runs in a browser while they happen.

    Or afterwards, from their event files alone. Loss, rate, what each worker does, servers, checkpoints, faults. Until
    SIGTERM or Ctrl-C.
    """
    with answering(as_json) as answer:
        # Lazily: numpy and the server take time to import.
        from headrace.machine.extras import require_extra

        require_extra("watch", "the page")
        from headrace.watch.application import Access
        from headrace.watch.running import run_watch

        token = read_token(token_file) if token_file else os.environ.get(_TOKEN, "")
        check_access(host, token, public)
        access = Access(token, any_host=not is_loopback(host))
        run_watch(run_dirs, access, host, port, wait, lambda url: answer.give({"url": url}, f"watch the run at {url}"))
