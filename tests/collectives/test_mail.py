"""Short messages between members: what one said last is read after it has gone."""

from __future__ import annotations

import os
import select

import pytest

from engine.conftest import until
from headrace.collectives.views.mail import Mail, MemberMail

SECRET = bytes(range(32))
HERE, THERE = (0, 0), (1, 0)


def refuse(peer: str) -> None:
    pytest.fail(f"a stranger at {peer}")


def test_the_last_message_of_one_that_has_ended_is_read() -> None:
    here, there = (MemberMail(me, SECRET, "127.0.0.1", refuse) for me in (HERE, THERE))
    told: list[Mail] = []

    def has_come(kind: str) -> bool:
        here.poll(0.01)
        told.extend(here.receive())
        return any(each[1] == kind for each in told)

    try:
        there.learn({HERE: here.address})
        there.send(HERE, "first", None)
        assert until(lambda: has_come("first"), 20)
        there.send(HERE, "last", "why it ends")
    finally:
        there.close()
    try:
        # The end of the connection is known before what came by it is read.
        assert select.select([here._listener.guard.ended_fd], [], [], 20)[0]
        assert until(lambda: has_come("last"), 20)
        assert (THERE, "last", "why it ends") in told
    finally:
        here.close()


def test_waking_one_that_is_closed_touches_no_other_file() -> None:
    mail = MemberMail(HERE, SECRET, "127.0.0.1", refuse)
    number = mail._wake_fd
    mail.close()
    other = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.dup2(other, number)
        mail.wake()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
    finally:
        for each in {other, number}:
            os.close(each)
