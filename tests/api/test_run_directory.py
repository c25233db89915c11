"""A run's directory belongs to one run, as long as one of its processes lives."""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headrace as hr
from engine import lasting
from engine.conftest import below, ended, state, until
from engine.lasting import OFTEN, files_of, lasting_job
from headrace.api.run_directory import RunDirLock, refuse_living
from headrace.errors import UnfitMachine, UsageError, WorkerFailed
from headrace.spec.events import LAUNCHER, Event, Notice, Saved, decode, encode
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RENDEZVOUS, events_path
from storm.disks import FailingDisk
from storm.failing_disk import POSSIBLE
from storm.schedule import Fault
from warm.programs import ROOT

TESTS = Path(__file__).resolve().parent.parent


def write_events(run_dir: Path, rank: int = LAUNCHER) -> None:
    journal = EventWriter(run_dir, rank, time.monotonic() - 7)
    journal.write(Notice(rank, 7.5, "a line"))
    journal.close()


def test_a_new_directory_is_made_and_held(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    refuse_living(run_dir)
    claim = RunDirLock(run_dir, continues=False)
    assert claim.attempt_s == 0.0
    message = (
        rf"/run is in use by a run that lives \(process {os.getpid()}\); wait for its end, end it, or name another"
    )
    for again in (
        lambda: RunDirLock(run_dir, continues=False),
        lambda: RunDirLock(run_dir, True),
        lambda: refuse_living(run_dir),
    ):
        with pytest.raises(UsageError, match=message):
            again()
    claim.close()
    refuse_living(run_dir)
    RunDirLock(run_dir, continues=False).close()


@pytest.mark.usefixtures("real_python")
def test_a_lock_is_not_inherited_by_whatever_is_started(tmp_path: Path) -> None:
    claim = RunDirLock(tmp_path, continues=False)
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is itself now, and no copy of this process any more
        claim.close()
        RunDirLock(tmp_path, continues=False).close()
        process.communicate(b"\n")


def test_a_directory_with_a_run_is_refused_to_a_new_one(tmp_path: Path) -> None:
    write_events(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"holds a run already; name another run_dir, or delete it; resume=True"):
        RunDirLock(tmp_path, continues=False)
    assert sorted(tmp_path.rglob("*")) == before
    claim = RunDirLock(tmp_path, continues=True)
    assert 7.5 < claim.attempt_s < 7.502
    with pytest.raises(UsageError, match="is in use by a run that lives"):
        RunDirLock(tmp_path, continues=False)
    claim.close()


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(UsageError, match="run_dir is empty, as an unset shell variable is; name a directory"):
        hr.fit(lasting_job(), run_dir="", engine=hr.ThreadEngine())


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    for rank in (LAUNCHER, 0, 1):
        write_events(tmp_path, rank)
    with events_path(tmp_path, 1).open("a") as file:
        file.write('{"kind":"notice","rank":1,"ti')
    whole = events_path(tmp_path, 0).read_text()
    events_path(tmp_path, 2).write_text('{"kind":"no')
    RunDirLock(tmp_path, continues=True).close()
    assert events_path(tmp_path, 0).read_text() == whole
    (line,) = events_path(tmp_path, 1).read_text().splitlines()
    assert decode(line) == Notice(1, 7.5, "a line")
    assert events_path(tmp_path, 2).read_text() == ""


def test_too_little_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        UnfitMachine, match=rf"a checkpoint takes about {10 * free:,} bytes and .* has [\d,]+ left; free"
    ):
        RunDirLock(tmp_path, continues=False, needed_bytes=10 * free)
    RunDirLock(tmp_path, continues=False).close()


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(UnfitMachine, match=r"cannot write to the run directory .*/a: Not a directory; name another"):
        RunDirLock(tmp_path / "a", continues=False)
    with pytest.raises(UnfitMachine, match=r"cannot write to the run directory .*/a/b: Not a directory"):
        RunDirLock(tmp_path / "a" / "b", continues=False)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UnfitMachine, match=r"cannot write to the run directory .*: File name too long; name another"):
        RunDirLock(tmp_path / ("a" * 300), continues=False)


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a disk of memory here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    message = r"cannot write to the run directory .*/run: Read-only file system; name another"
    with mounted(tmp_path / "disk", "size=1m,ro"), pytest.raises(UnfitMachine, match=message):
        hr.fit(lasting_job(), run_dir=tmp_path / "disk" / "run", engine=hr.ThreadEngine())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_must_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UnfitMachine, match=r"cannot write to the run directory .*: Permission denied; name another"):
        RunDirLock(tmp_path, continues=False)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    message = "cannot write to the run directory .*: No space left on device; name another"
    disk = tmp_path / "disk"
    with mounted(disk, "size=1m"):
        RunDirLock(disk, continues=False).close()
        (disk / "lock").unlink()
        with suppress(OSError), open(disk / "others", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert shutil.disk_usage(disk).free == 0
        with pytest.raises(UnfitMachine, match=message):
            RunDirLock(disk, continues=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_is_too_small_for_one_checkpoint(tmp_path: Path) -> None:
    message = r"a checkpoint takes about [\d,]+ bytes and .* has [\d,]+ left"
    with mounted(tmp_path / "disk", "size=4k"), pytest.raises(UnfitMachine, match=message):
        hr.fit(lasting_job(), run_dir=tmp_path / "disk", engine=hr.ThreadEngine())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_is_full_at_the_end_of_a_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def fill(event: Event) -> None:
        if event.kind == "worker_started":
            with suppress(OSError), open(disk / "others", "ab", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    message = rf"cannot save the trained model, [\d,]+ bytes, in {disk}: .*No space left on device.*it is kept in (.*)$"
    with mounted(disk, "size=1m"), pytest.raises(WorkerFailed, match=message) as failed:
        # Steps enough for the disk to be full before the model is written.
        hr.fit(lasting_job("plain", epochs=60), hr.Mirrored(2), run_dir=disk, on_event=fill, checkpoints=False)
    assert failed.value.worker_exit_code == 3
    kept = Path(str(failed.value).rpartition(" ")[2])
    assert load_file(kept)
    shutil.rmtree(kept.parent)


def chatty(output: Tensor, target: Tensor) -> Tensor:
    sys.stdout.write("x" * 4096)
    sys.stderr.write("y" * 4096)
    return nn.functional.mse_loss(output, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_what_workers_print_ends_no_training_where_the_disk_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, inputs = tmp_path / "disk", torch.zeros(400, 2)
    job = hr.Job(
        functools.partial(nn.Linear, 2, 2), loss=chatty, optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(inputs, inputs), global_batch_size=4, epochs=1,
    )  # fmt: skip
    with mounted(disk, "size=256k"), pytest.raises(WorkerFailed, match="cannot save the trained model") as failed:
        hr.fit(job, hr.Mirrored(2), run_dir=disk / "run", checkpoints=False)
    kept = Path(str(failed.value).rpartition(" ")[2])
    assert load_file(kept)
    shutil.rmtree(kept.parent)


@pytest.mark.slow
@pytest.mark.skipif(not POSSIBLE, reason="a disk that fails needs root, libfuse3 and mfusepy")
def test_training_goes_on_while_the_disk_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = FailingDisk(tmp_path / "disk")
    timers: list[threading.Timer] = []

    def fail(event: Event) -> None:
        if event.kind == "worker_started" and not timers:
            disk.fail(Fault("failing disk", 0, 1))
            timers.append(threading.Timer(2.5, disk.mend))
            timers[0].start()

    try:
        run = hr.fit(lasting_job("plain", epochs=600), hr.Mirrored(2), run_dir=disk.folder / "run", on_event=fail,
                     seconds=6)  # fmt: skip
        assert run.status == "ok"
        assert {event.rank for event in run.events if event.kind == "worker_ended"} == {0, 1}
    finally:
        timers[0].join()
        disk.close()
    said = capsys.readouterr().err
    assert "fails (Input/output error): training goes on, without new checkpoints" in said
    assert f"the disk of {disk.folder / 'run'} works again" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done: list[int] = []

    def protect(event: Event) -> None:
        # A mount above the first one: the files that are open there would keep that from becoming read-only.
        if event.kind == "worker_started" and not done:
            subprocess.run(["mount", "--bind", disk, disk], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
            done.append(event.rank)

    message = rf"cannot save the trained model, [\d,]+ bytes, in {disk}: .*Read-only file system.*it is kept in (.*)$"
    with mounted(disk, "size=8m"):
        try:
            with pytest.raises(WorkerFailed, match=message) as failed:
                hr.fit(lasting_job("plain", epochs=60), hr.Mirrored(2), run_dir=disk, on_event=protect)
        finally:
            for _ in done:
                subprocess.run(["umount", "-l", disk], check=True)
        assert failed.value.worker_exit_code == 3
        kept = Path(str(failed.value).rpartition(" ")[2])
        assert load_file(kept)
        shutil.rmtree(kept.parent)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_files_may_grow_no_further(tmp_path: Path, victim: int, capsys: pytest.CaptureFixture[str]) -> None:
    limited = []

    def limit(event: Event) -> None:
        # Fewer bytes than the events of one rank have, and than the trained model.
        if event.kind == "worker_started" and event.rank == victim:
            resource.prlimit(event.pid, resource.RLIMIT_FSIZE, (300, 300))
            limited.append(event.rank)

    def train() -> hr.Run:
        job = lasting_job("plain", epochs=60)
        return hr.fit(job, hr.Mirrored(2), run_dir=tmp_path / "run", on_event=limit, checkpoints=False)

    if victim == 0:
        # No other directory takes it either.
        with pytest.raises(
            WorkerFailed, match=r"rank 0 on .* cannot save the trained model.*File too large.*make room"
        ):
            train()
    else:
        run = train()
        assert run.status == "ok"
        assert load_file(tmp_path / "run" / "model.safetensors")
        assert any("did not take the last events of rank 1" in getattr(event, "text", "") for event in run.events)
    assert limited == [victim]


@contextmanager
def training(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of hours in a process of its own."""
    code = (
        "import sys, headrace as hr; from engine.lasting import *\n"
        "hr.fit(lasting_job('plain', epochs=10**6, eval_data=None), hr.Mirrored(2), run_dir=sys.argv[1], "
        "checkpoints=hr.Checkpoints(every_steps=50, every_s=None, keep=2))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT / "src")])}
    with subprocess.Popen([sys.executable, "-c", code, run_dir], env=environment, text=True,
                          stderr=subprocess.DEVNULL) as process:  # fmt: skip
        try:
            assert until(lambda: len(list(run_dir.glob("checkpoints/step-????????"))) > 1, 60)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_a_run_that_lives_is_left_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "a"
    job = lasting_job("plain", epochs=10**6, eval_data=None)
    with training(run_dir) as process:
        for resume in (False, True):
            with pytest.raises(UsageError, match=rf"in use by a run that lives \(process {process.pid}\)"):
                hr.fit(job, hr.Mirrored(2), run_dir=run_dir, resume=resume, engine=hr.ThreadEngine())
        # The launcher is killed while a worker cannot end: it is stopped.
        everything = below(process.pid)
        workers = [pid for child in everything for pid in below(child)]
        assert len(workers) == 2, {pid: Path(f"/proc/{pid}/stat").read_text() for pid in (*everything, *workers)}
        os.kill(workers[1], signal.SIGSTOP)
        assert until(lambda: state(workers[1]) == "T", 30)
        process.kill()
        process.wait()
    # It ends as the others do: by the signal that the end of its parent is.
    assert until(lambda: all(map(ended, everything)), 30)
    run = hr.fit(lasting_job("plain", steps=files_of(run_dir)[0] + 5, epochs=None), hr.Mirrored(2), run_dir=run_dir,
                 resume=True, engine=hr.ThreadEngine(), checkpoints=OFTEN)  # fmt: skip
    assert run.status == "ok"


def test_a_worker_that_outlives_its_launcher_still_holds_it(tmp_path: Path) -> None:
    claim = RunDirLock(tmp_path, continues=False)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        claim.close()
        with pytest.raises(UsageError, match="in use by a run that lives"):
            refuse_living(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    RunDirLock(tmp_path, continues=False).close()


def test_a_finished_run_lets_go(tmp_path: Path) -> None:
    hr.fit(lasting_job("plain"), run_dir=tmp_path, engine=hr.ThreadEngine())
    refuse_living(tmp_path)
    assert re.fullmatch(r"\d+", (tmp_path / "lock").read_text())
    assert lasting.files_of(tmp_path)[0] == lasting.ROUNDS


@pytest.mark.slow
def test_where_the_workers_of_an_earlier_attempt_met_is_deleted(tmp_path: Path) -> None:
    store = "import os, sys; from torch.distributed import FileStore; FileStore(sys.argv[1], 2).set('0', 'old')"
    subprocess.run([sys.executable, "-c", f"{store}; os._exit(0)", str(tmp_path / RENDEZVOUS)], check=True)
    assert (tmp_path / RENDEZVOUS).exists()
    RunDirLock(tmp_path, continues=True).close()
    assert not (tmp_path / RENDEZVOUS).exists()


def test_a_resumed_attempt_begins_after_every_event_of_the_one_before(tmp_path: Path) -> None:
    # Found by scripts/storm, seed 11: a save ends while steps go on, and its event is written after theirs.
    # The step counted twice: by its time, it belonged to the attempt that did it again.
    path = events_path(tmp_path, 0)
    path.parent.mkdir()
    events = [Notice(0, 0.00001, 'says "time_s":9.0,'), Saved(0, 7.25, 8, 1, 0.0, 0.0), Saved(0, 3.5, 4, 1, 0.0, 0.0)]
    path.write_text("".join(f"{encode(event)}\n" for event in events) + '{"kind":"stepped","rank":0,"time_s":8.0,')
    lock = RunDirLock(tmp_path, continues=True)
    lock.close()
    assert 7.25 < lock.attempt_s < 7.252
