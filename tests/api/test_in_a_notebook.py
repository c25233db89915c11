"""The same in the kernel of a notebook: what cells show, and what interrupting one does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import until

SETUP = """
import functools, pathlib, torch, headrace as hr
inputs = torch.randn(64, 4)
def job(**length):
    return hr.Job(model=lambda: torch.nn.Linear(4, 1), task=hr.tasks.regression(), global_batch_size=8,
                  data=(inputs, inputs.sum(1, keepdim=True)), optimizer=functools.partial(torch.optim.SGD, lr=0.01),
                  **length)
run = hr.fit(job(epochs=3), hr.Mirrored(workers=2))
run
"""
LONG = """
def tell(event):
    if event.kind == "stepped":
        pathlib.Path("begun").touch()
run = hr.fit(job(epochs=10**6), hr.Mirrored(workers=2), on_event=tell)
"""
AFTER = "print(run.status, sum(event.kind == 'worker_ended' for event in run.events), type(run.model).__name__)"


def shown(cell: Any) -> str:
    """Returns what a cell shows as HTML and text."""
    found = [output.get("data", {}).get("text/html", "") + output.get("text", "") for output in cell.outputs]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
@pytest.mark.filterwarnings("default")
def test_cells_show_progress_and_runs_and_interrupting_one_returns_the_run_so_far(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, LONG, AFTER)]
    book = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}})

    def interrupt() -> None:
        if until(lambda: (tmp_path / "begun").exists(), 100):
            asyncio.run(client.km.interrupt_kernel())

    thread = threading.Thread(target=interrupt)
    thread.start()
    client.execute()
    thread.join()
    first, _, after = book.cells
    assert "<progress" in shown(first)
    assert 'class="headrace"' in shown(first)
    assert "Does the loss fall?" in shown(first)
    assert shown(after) == "interrupted 2 Linear\n"
