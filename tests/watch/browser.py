"""Headless Chromium by its own protocol, over pipes: what a page shows, asks for, and complains about."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


class Tab:
    """A page in the browser.

    Attributes:
        errors: exceptions, error lines of the console, and what the content rules have refused.
        asked: addresses of all requests.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._rest = b""
        self._number = 0
        self._session = ""
        self._loads = 0
        self.errors: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        """Opens an address, and returns when its files are there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loads = 0
        # An address that differs behind # alone is of the same document.
        if "loaderId" in self.call("Page.navigate", url=url):
            while not self._loads:
                self._next()

    def value(self, expression: str) -> Any:
        """Returns the value of an expression of the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Returns the value of an expression when it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, (expression, self.errors, self.value("document.body?.innerText"))
            select.select([self._read], [], [], 0.05)
        return value

    def press(self, key: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def shoot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], 60)[0], "the browser does not answer"
            came = os.read(self._read, 1 << 20)
            assert came, "the browser has ended"
            self._rest += came
        line, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(line)
        self._note(found.get("method"), found.get("params", {}))
        return found

    def _note(self, method: str | None, told: Any) -> None:
        if method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"])[:1000])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"])[:1000])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])


@contextmanager
def browser(home: Path) -> Iterator[Tab]:
    """Yields a tab of a browser that ends with the block."""
    assert CHROMIUM is not None
    (their_read, write), (read, their_write) = os.pipe(), os.pipe()
    command = f'exec "$@" 3<&{their_read} 4>&{their_write}'
    options = [*_OPTIONS, f"--user-data-dir={home}", "--remote-debugging-pipe"]
    # bash, for descriptors of two digits.
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", CHROMIUM, *options],
        pass_fds=(their_read, their_write),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        tab = Tab(write, read)
        yield tab
        tab._session = ""
        tab.call("Browser.close")
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
