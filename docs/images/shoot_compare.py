"""Takes the picture of the page of a comparison: compare-light.png and compare-dark.png.

python docs/images/shoot_compare.py    while the machine does nothing else; needs chromium
"""

from __future__ import annotations

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WIDTH, HEIGHT = 1120, 880


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from watch.browser import browser

    with tempfile.TemporaryDirectory() as name:
        command = ["headrace", "compare", "job.py", "--workers", "2", "--run-dir", f"{name}/runs"]
        subprocess.run(command, cwd=ROOT / "examples" / "digits", check=True)
        with browser(Path(name) / "home") as tab:
            for dark in (False, True):
                tab.open((Path(name) / "runs" / "report.html").as_uri(), WIDTH, dark)
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
                shot = tab.call("Page.captureScreenshot", format="png", clip=clip)["data"]
                (HERE / f"compare-{'dark' if dark else 'light'}.png").write_bytes(base64.b64decode(shot))


if __name__ == "__main__":
    main()
