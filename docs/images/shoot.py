"""Takes the pictures of the gallery, each light and dark: runs the commands that stand there, and opens their pages.

python docs/images/shoot.py [NAME ...]    while the machine does nothing else; needs chromium, and npm for `browser`
"""

from __future__ import annotations

import base64
import functools
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTH, COLOURS = 1120, 64


@dataclass(frozen=True)
class Shot:
    """A picture of a page.

    Attributes:
        command: makes the page, in a folder that has the repository's examples.
        page: the file; "folder/" for a folder that a server shows; or the command of a server, which is begun while the
            first one goes on where it is `watch`.
        height: of the picture, from the top of the page.
        figure: the words that the figure's title begins with, where that alone is shown.
        ready: an expression that is true when the page is.
    """

    command: str
    page: str
    height: int = 880
    figure: str = ""
    ready: str = "true"


_TRAIN = "headrace train examples/digits/job.py --run-dir runs/a"
_WATCH, _SERVE = "headrace watch runs/a --port 0", "headrace serve model --port 0"
_MODEL = "examples/simulate/model.toml --cluster examples/simulate/cluster.toml --global-batch-size 512"
_ANSWERED = "document.querySelector('meter') !== null"
SHOTS = {
    "compare": Shot("headrace compare examples/digits/job.py --workers 2 --run-dir runs", "runs/report.html", 856),
    "report": Shot(f"{_TRAIN} --strategy mirrored --workers 2 && headrace report runs/a", "runs/a/report.html", 960),
    "watch": Shot(f"{_TRAIN} --strategy mirrored --workers 2 --set epochs=100000", _WATCH, 900),
    "stages": Shot(
        f"{_TRAIN} --strategy 'pipeline(stages=2, micro_batches=4)' && headrace report runs/a",
        "runs/a/report.html",
        figure="When does each stage work?",
    ),
    "staleness": Shot(
        f"{_TRAIN} --strategy parameter_server --workers 3 && headrace report runs/a",
        "runs/a/report.html",
        figure="How old are the parameters of a gradient?",
    ),
    "recommend": Shot(f"headrace recommend {_MODEL} --examples 1281167 --out page.html", "page.html", 760),
    "verify": Shot("headrace verify examples/digits/job.py --workers 2 --html page.html", "page.html", 760),
    "bench": Shot("headrace bench --quick --only matrix,memory,storage --out page.html", "page.html", 900),
    "serve": Shot(f"{_TRAIN} && headrace export runs/a -o model", _SERVE, 920, ready=_ANSWERED),
    "browser": Shot(
        f"{_TRAIN} && headrace export runs/a -o page --target browser",
        "page/",
        620,
        ready=_ANSWERED,
    ),
}


def main() -> None:
    """Takes the pictures that are named, or all."""
    sys.path.insert(0, str(ROOT / "tests"))
    from watch.browser import browser

    for name in sys.argv[1:] or SHOTS:
        shot = SHOTS[name]
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "home") as tab:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            with shown(shot, Path(folder)) as address:
                for dark in (False, True):
                    tab.open(address, WIDTH, dark)
                    tab.until(shot.ready)
                    time.sleep(1.0)  # what moves has come to rest
                    save(picture(tab, shot), HERE / f"{name}-{'dark' if dark else 'light'}.png")


@contextmanager
def shown(shot: Shot, folder: Path) -> Iterator[str]:
    """Yields the address of a shot's page, after its command; a server is shown while it answers."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    start = functools.partial(subprocess.Popen, cwd=folder, env=environment, start_new_session=True)
    if shot.page.startswith("headrace "):
        begun = start(["bash", "-c", shot.command], stderr=subprocess.DEVNULL)
        if shot.page == _WATCH:
            time.sleep(20)  # so much of the run is drawn
        else:
            begun.wait(120)
        server = start(shot.page.split(), stdout=subprocess.PIPE, text=True)
        yield server.stdout.readline().split()[-1]
        for process in (server, begun):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        return
    subprocess.run(["bash", "-c", shot.command], cwd=folder, env=environment, check=True)
    if not shot.page.endswith("/"):
        yield (folder / shot.page).as_uri()
        return
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder / shot.page))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def picture(tab: Any, shot: Shot) -> bytes:
    """Returns the PNG of the top of the page that is open, or of one of its figures."""
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": shot.height}
    if shot.figure:
        box = f"""(([x, y, width, height]) => ({{x: x - 16, y: y - 16, width: width + 32, height: height + 32}}))(
            [...document.querySelectorAll("figure")].filter((it) => it.innerText.startsWith({shot.figure!r}))
            .map((it) => it.getBoundingClientRect()).map((it) => [it.x, it.y + scrollY, it.width, it.height])[0])"""
        clip = tab.value(box)
    taken = tab.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip | {"scale": 1})
    return base64.b64decode(taken["data"])


def save(taken: bytes, file: Path) -> None:
    """Writes a picture with so few colours that it is small."""
    Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main()
