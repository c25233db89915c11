"""`headrace watch`: a page of runs as they happen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.output import Answer
from headrace.web.access import check_access, is_loopback, read_token

_EXAMPLES = """
  headrace watch runs/a
  headrace watch runs --port 9000
  headrace watch runs/a --host 0.0.0.0 --token-file token
"""
_TOKEN = "HEADRACE_WATCH_TOKEN"


@command(_EXAMPLES)
def watch(
    answer: Answer,
    run_dirs: Annotated[
        list[Path], argument("RUN_DIR", "Directories of runs or comparisons, or directories that hold such ones.")
    ],
    host: Annotated[str, option("--host ADDRESS", "Where to listen.")] = "127.0.0.1",
    port: Annotated[int, option("--port", "0 for a free one.", min=0, max=65535)] = 8010,
    token_file: Annotated[
        Path | None,
        option("--token-file FILE", f"The page asks for the token in this file of mode 600; or for that in {_TOKEN}."),
    ] = None,
    public: Annotated[bool, option("--public", "Other machines may look without a token.")] = False,
    wait: Annotated[bool, option("--wait", "A directory need not hold a run yet.")] = False,
) -> None:
    """Show runs in a browser while they happen.

    Or afterwards, from their event files alone. Loss, rate, what each worker does, servers, checkpoints, faults. Until
    SIGTERM or Ctrl-C.
    """
    # Lazily: numpy and the server take time to import.
    from headrace.machine.extras import require_extra

    require_extra("watch", "the page")
    from headrace.watch.application import Access
    from headrace.watch.running import run_watch

    token = read_token(token_file) if token_file else os.environ.get(_TOKEN, "")
    check_access(host, token, public)
    access = Access(token, any_host=not is_loopback(host))
    run_watch(run_dirs, access, host, port, wait, lambda url: answer.give({"url": url}, f"watch the run at {url}"))
