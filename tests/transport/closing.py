"""Closes both ends of a connection at once while a message is half sent, many times; run by test_closing."""

from __future__ import annotations

import sys
import threading

import zmq

from headrace.transport.zeromq import ConnectionEvents, listen, make_socket

PARTS = [bytes(1 << 17)] * 8


def close_both() -> None:
    contexts = [zmq.Context(), zmq.Context()]
    pull, push = make_socket(contexts[0], zmq.PULL), make_socket(contexts[1], zmq.PUSH)
    pull.rcvhwm, push.sndhwm = 1, 3
    ends = [ConnectionEvents(pull, zmq.EVENT_ACCEPTED), ConnectionEvents(push, zmq.EVENT_CONNECTED)]
    push.connect(listen(pull, "tcp://127.0.0.1:0"))
    while push.poll(10, zmq.POLLOUT):
        push.send_multipart(PARTS, zmq.NOBLOCK)
    together = threading.Barrier(2)

    def close(end: ConnectionEvents, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        together.wait()
        end.close()
        context.term()

    threads = [threading.Thread(target=close, args=each) for each in zip(ends, contexts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


for _ in range(int(sys.argv[1])):
    close_both()
