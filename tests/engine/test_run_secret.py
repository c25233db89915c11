"""Where a run's secret comes from, and which are refused."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.engine.torchrun import secret
from headrace.engine.torchrun.secret import HOW_TO_MAKE, SECRET, SECRET_FILE, ask, hand_out, read_secret
from headrace.errors import UsageError

TEXT = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_environment_and_file_give_the_same(file: Path) -> None:
    environment = {SECRET: TEXT}
    expected = hashlib.blake2b(TEXT.encode(), digest_size=32).digest()
    assert read_secret(environment) == read_secret({SECRET_FILE: str(file)}) == expected
    assert environment == {}, "what is started later does not inherit it"
    assert read_secret({}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UsageError, match=rf"has mode {mode:o} .* chmod 600 {file}$"):
        read_secret({SECRET_FILE: str(file)})


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(UsageError, match=rf"belongs to user {own}; .* user {own + 1} alone .*: chown {own + 1} "):
        read_secret({SECRET_FILE: str(file)})


@pytest.mark.parametrize("given", ["short", TEXT[:31], "  " + TEXT[:31] + "\n"])
def test_a_short_one_is_refused(file: Path, given: str) -> None:
    file.write_text(given)
    for environment in ({SECRET: given}, {SECRET_FILE: str(file)}):
        with pytest.raises(
            UsageError, match=rf"has {len(given.strip())} characters, .* at least 32: \(umask 077; "
        ) as e:
            read_secret(environment)
        assert given.strip() not in str(e.value).replace(str(file), "")


def test_a_file_that_is_not_there_is_refused_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: .*No such file.*token_hex\(32\)"):
        read_secret({SECRET_FILE: str(tmp_path / "secret")})
    with pytest.raises(UsageError, match=r"cannot be read: .*directory"):
        read_secret({SECRET_FILE: str(tmp_path)})


def test_the_command_line_takes_a_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.chmod(0o644)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", SECRET_FILE: ""}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "examples/digits/job.py", "--secret-file", str(file)]) == 2
    assert f"chmod 600 {file}" in "".join(capsys.readouterr().err.split("\n"))


@pytest.mark.slow
def test_the_line_that_makes_one_makes_one_that_is_taken(tmp_path: Path) -> None:
    line = HOW_TO_MAKE.partition(", copy")[0]
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert read_secret({SECRET_FILE: str(tmp_path / "secret")})


def end(given: socket.socket) -> None:
    given.shutdown(socket.SHUT_RDWR)
    given.close()


def test_processes_of_one_user_are_given_it_in_any_order(tmp_path: Path) -> None:
    name = f"{tmp_path}:1"
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(ask, name, 20.0)
        given = hand_out(name, "the address and the secret")
        assert early.result(20.0) == ask(name, 20.0) == "the address and the secret"
    with pytest.raises(UsageError, match=r"another run of this user has .*:1 \(Address already in use\)"):
        hand_out(name, "of another run")
    end(given)


def test_another_user_is_neither_given_it_nor_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{tmp_path}:2"
    given = hand_out(name, "the address and the secret")
    monkeypatch.setattr(secret, "user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(UsageError, match=rf"user {os.geteuid() + 1} of this host has taken"):
        ask(name, 20.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(secret._abstract(name))
        assert stranger.recv(1000) == b""
    end(given)


def test_who_is_not_there_is_not_waited_for_longer(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no process of this host has it after 0\.05 s"):
        ask(f"{tmp_path}:3", 0.05)


@pytest.mark.parametrize("waiting", [1, 0], ids=["it is accepted by the kernel", "more wait than may"])
def test_who_listens_and_does_not_answer_is_not_waited_for_longer(tmp_path: Path, waiting: int) -> None:
    """As a process that was stopped after `listen`."""
    name = f"{tmp_path}:4"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other,
    ):
        frozen.bind(secret._abstract(name))
        frozen.listen(waiting)
        other.connect(secret._abstract(name))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, name, 0.1)
            try:
                with pytest.raises(TimeoutError, match=r"that has it does not answer within 0\.1 s"):
                    asked.result(20.0)
            finally:
                # Clients that wait get an error.
                frozen.close()
                other.close()


def test_who_ends_before_the_answer_is_said(tmp_path: Path) -> None:
    name = f"{tmp_path}:5"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dying, ThreadPoolExecutor(1) as pool:
        dying.bind(secret._abstract(name))
        dying.listen()
        asked = pool.submit(ask, name, 20.0)
        dying.accept()[0].close()
        with pytest.raises(ConnectionError, match="has ended"):
            asked.result(20.0)
