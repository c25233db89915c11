"""Servers of tests: requests to an application in this process, and commands that run one in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def http_scope(method: str, address: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a server tells an application of a request; a query may stand behind the path."""
    path, _, query = address.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }


@contextmanager
def command_server(command: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Yields the process of a command that serves, and what it told when it began to listen; kills it at the end."""
    line = [sys.executable, "-c", "from headrace.cli import main; main()", command, "--json", *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())
                assert lines[-1], f"the server has ended with {process.wait()}"
            yield process, json.loads("".join(lines))
        finally:
            process.kill()
