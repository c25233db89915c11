"""`headrace export` of what cannot be exported: which file, which layer, which operation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.test_predict import JOB
from headrace.cli import run
from headrace.errors import UsageError

Capture = pytest.CaptureFixture[str]

GAMMA = """
class Gamma(torch.nn.Linear):
    def forward(self, input):
        return torch.digamma(super().forward(input).abs() + 1)
"""


@pytest.mark.slow
def test_a_checkpoint_that_is_incomplete_names_its_file(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "job.py").write_text(JOB)
    run_dir = tmp_path / "r"
    assert run(["train", str(tmp_path / "job.py"), "--run-dir", str(run_dir), "--checkpoint-every", "1"]) == 0
    model = run_dir / "model.safetensors"
    whole = model.read_bytes()
    for spoiled in (whole[:-4], b"", b"\xff" * 100):
        model.write_bytes(spoiled)
        assert run(["export", str(run_dir), "-o", str(tmp_path / "m"), "--formats", "pt2"]) == 5
        captured = capsys.readouterr()
        assert "model.safetensors: it is not the whole model that was saved" in captured.err
        assert "Traceback" not in captured.err
    model.unlink()
    (newest,) = (run_dir / "checkpoints").glob("*2")
    shard = newest / "rank-0.safetensors"
    kept = shutil.copy(shard, tmp_path)
    for spoil in (shard.unlink, lambda: shard.write_bytes(Path(kept).read_bytes()[:-1])):
        spoil()
        assert run(["export", str(run_dir), "-o", str(tmp_path / "m"), "--step", "2"]) == 5
        assert "rank-0.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_an_operation_without_an_onnx_form_is_named_with_its_layer(tmp_path: Path, capsys: Capture) -> None:
    job = JOB.replace("torch.nn.Linear(6, 3))", "torch.nn.Linear(6, 3), Gamma(3, 3))").replace("job =", f"{GAMMA}job =")
    (tmp_path / "job.py").write_text(job)
    assert run(["train", str(tmp_path / "job.py"), "--run-dir", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    assert run(["export", str(tmp_path / "r"), "-o", str(tmp_path / "m"), "--formats", "onnx"]) != 0
    told = capsys.readouterr().err
    assert "the model has no ONNX form, at 2 (Gamma): " in told
    assert "digamma" in told
    assert "take --formats pt2" in told
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(("words", "step"), [((), None), (("--step", "7"), 7)])
def test_the_step_that_is_asked_for_is_exported(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], step: int | None
) -> None:
    asked: list[object] = []

    def export_run(*what: object) -> None:
        asked.extend(what)
        raise UsageError("it is only asked for")

    monkeypatch.setattr("headrace.api.exporting.export_run", export_run)
    monkeypatch.setattr("headrace.cli.commands.saved.export.job_of_run", lambda *_, **__: "the job")
    assert run(["export", "a", "-o", "m", *words]) == 2
    assert asked[:3] == ["the job", Path("a"), Path("m")]
    assert asked[4] == step
