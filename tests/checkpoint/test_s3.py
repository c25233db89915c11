"""Copies on S3: a server on this machine that speaks its protocol, and the client that users have."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from checkpoint.services import files_at, local_files, spoil
from checkpoint.states import equal, save, small_state
from engine.lasting import lasting_job
from headrace.checkpoint import CheckpointFolder
from headrace.checkpoint.remote import RemoteFolder
from headrace.errors import UnfitMachine
from headrace.spec.events import Notice

URL = "s3://bucket/runs/a"


@pytest.fixture
def s3fs() -> Any:
    """The client, imported by the tests alone: each process that collects them would import it, too."""
    return pytest.importorskip("s3fs", reason='needs a client of S3: pip install "headrace[remote]"')


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, s3fs: Any) -> Iterator[str]:
    """A bucket, which the client finds as it finds any other: by the environment."""
    moto_server = pytest.importorskip("moto.server", reason='needs a server of S3: pip install "moto[s3,server]"')
    served = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    try:
        host, port = served.get_host_and_port()
        address = f"http://{host}:{port}"
        urllib.request.urlopen(f"{address}/moto-api/reset", data=b"").close()
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        for name, value in {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield address
    finally:
        served.stop()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.slow
def test_a_run_is_copied_to_s3_and_goes_on_from_there(bucket: str, s3fs: Any, tmp_path: Path) -> None:
    own, remote = CheckpointFolder(tmp_path / "own"), RemoteFolder(URL)
    remote.require_writable()
    for step in (10, 20, 30):
        # The last is larger than one part of an upload.
        save(own, step, ranks=1, numbers=14_000_000 if step == 30 else 6)
        remote.send(own.open(step))
        remote.prune(step, keep=2)
    assert files_at(URL) == local_files(own.path)
    spoil(URL, 30, "half")
    back = CheckpointFolder(tmp_path / "back")
    step, (wrong,) = remote.receive(back)
    assert (step, wrong.path) == (20, f"{URL}/step-00000030")
    assert equal(back.open(20).read(0), small_state(20))
    remote.prune(20, keep=2)
    assert remote.steps() == (20,)

    with pytest.raises(UnfitMachine, match=r"s3://nowhere/a cannot be written: .*check the address, the credentials"):
        RemoteFolder("s3://nowhere/a").require_writable()
    assert "nowhere" not in s3fs.S3FileSystem().ls(""), "a bucket is not made where a name is misspelt"


@pytest.mark.slow
@pytest.mark.full
def test_a_training_goes_on_from_s3_bit_for_bit(bucket: str, tmp_path: Path) -> None:
    url = f"{URL}/trained"
    often = hr.Checkpoints(every_steps=4, copy_to=url)

    def fit(name: str, steps: int, **asked: object) -> hr.Run:
        job = lasting_job("plain", steps=steps, epochs=None)
        return hr.fit(job, run_dir=tmp_path / name, engine=hr.ThreadEngine(), **asked)  # type: ignore[arg-type]

    fit("a", 6, checkpoints=often)
    shutil.rmtree(tmp_path / "a")
    resumed = fit("b", 9, checkpoints=often, resume=url)
    whole = fit("whole", 9)
    assert resumed.summary.started.resumed_step == 6
    ours, theirs = (run.model.state_dict() for run in (resumed, whole))
    assert all((ours[name] == theirs[name]).all() for name in ours)
    texts = [event.text for event in resumed.events if isinstance(event, Notice)]
    assert texts[-1] == f"the checkpoint of step 9 is at {url}, too"
