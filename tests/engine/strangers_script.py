"""A rank of a run that lets itself be attacked in its third round, or the stranger.

`strangers_script.py FOLDER yes|no`, with encryption or without.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from pathlib import Path
from threading import Thread

import headrace as hr
from engine.networks import RUN_SECRET, go_there
from engine.ranks import say, total
from engine.victims import make_job
from headrace.engine.torchrun.key_value import NotOfThisRun, StoreClient
from headrace.engine.torchrun.secret import read_secret
from headrace.engine.torchrun.store_server import StoreServer
from headrace.errors import HeadraceError
from transport.outside import greeting

FOLDER = Path(sys.argv[1])
LISTENS = "0A"
SILENT_S = 0.2


def listening() -> list[str]:
    """The addresses on which processes of this host listen, "10.97.0.1:29500"."""
    found = []
    for line in Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
        place, state = line.split()[1], line.split()[3]
        number, port = place.split(":")
        if state == LISTENS:
            found.append(f"{socket.inet_ntoa(bytes.fromhex(number)[::-1])}:{int(port, 16)}")
    return found


def wait_for(*names: str) -> None:
    while not all((FOLDER / name).exists() for name in names):
        time.sleep(0.02)


def train(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 3:
            part = FOLDER / f"{worker.rank}.part"
            part.write_text("\n".join(listening()))
            part.rename(FOLDER / f"ports-{worker.rank}")
            wait_for("attacked")
        worker.step(batch)


def recorded() -> bytes:
    """What a client sends to a store of another run, which has the same secret."""
    secret = read_secret({"HEADRACE_SECRET": RUN_SECRET})
    assert secret
    server = StoreServer("tcp://127.0.0.1:0", secret, lambda _: None)
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def forward() -> None:
            inner = socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])))
            outer, _ = proxy.accept()
            with inner, outer:
                Thread(target=copy, args=(inner, outer, bytearray()), daemon=True).start()
                copy(outer, inner, sent)

        thread = Thread(target=forward)
        thread.start()
        client = StoreClient(f"tcp://127.0.0.1:{proxy.getsockname()[1]}", secret, 20.0)
        client.set("headrace/0/agreed/1", "of another run")
        client.close()
        thread.join()
    server.close()
    return bytes(sent)


def copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    while content := source.recv(1 << 16):
        kept += content
        target.sendall(content)


def told(place: str, sent: bytes) -> int:
    """Sends bytes there; returns how many come back before there is silence or an end, -1 if there is no connection."""
    host, _, port = place.rpartition(":")
    count = 0
    try:
        with socket.create_connection((host, int(port)), SILENT_S) as connection:
            connection.sendall(sent)
            while content := connection.recv(1 << 16):
                count += len(content)
    except (ConnectionError, TimeoutError):
        return count or -1
    return count


def attack() -> None:
    wait_for("ports-0", "ports-1")
    places = [place for rank in range(2) for place in (FOLDER / f"ports-{rank}").read_text().split()]
    dice, record = random.Random(0), recorded()
    wrong = read_secret({"HEADRACE_SECRET": RUN_SECRET[::-1]})
    assert wrong
    for place in sorted({place for place in places if not place.startswith("127.")}):
        heard = [told(place, b"")]
        if heard != [-1]:
            heard += [told(place, sent) for sent in (dice.randbytes(5000), greeting() + dice.randbytes(300), record)]
        say(place=place, heard=heard)
    try:
        StoreClient(f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", wrong, 20.0)
    except NotOfThisRun as error:
        say(refused=str(error))
    say(loopback=[place for place in places if place.startswith("127.")], recorded=len(record))
    (FOLDER / "attacked").touch()


def main() -> None:
    go_there()
    if "RANK" not in os.environ:
        attack()
        return
    try:
        run = hr.launch(train, make_job(), "mirrored", encrypt=sys.argv[2] == "yes")
    except HeadraceError as error:
        say(error=type(error).__name__, message=str(error))
        raise
    say(status=run.status, total=total(run.model))


main()
