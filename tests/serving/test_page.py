"""The page of the server in headless Chromium: its rules for content let its own script ask the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.test_in_browsers import CHROMIUM, seen_by_chromium
from serving.folders import listening, looked_up, scaled


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_shows_the_models(tmp_path: Path) -> None:
    with listening(scaled(tmp_path / "a", 2.0), looked_up(tmp_path / "b")) as address:
        seen = seen_by_chromium(f"http://{address}/", tmp_path / "home")
    assert ">lookup</option>" in seen
    assert ">m</option>" in seen
    assert "takes user INT64 (any), item INT64 (any); returns row FP32 (any, 2), sum FP32 (any, 2)" in seen
