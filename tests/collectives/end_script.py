"""One end of a way, to be killed: port or link, which transport, and for a link the address."""

from __future__ import annotations

import sys
import time

from headrace.transport.base import Slots
from transport.ways import mail_of, next_of, open_link, open_port

SLOTS = Slots([8])


def main() -> None:
    end, way, *address = sys.argv[1:]
    if end == "link":
        link = open_link(way, *address, SLOTS, SLOTS)
        link.send(b"here", [0])
        next_of(link)
        time.sleep(1000)
    port = open_port(way, SLOTS, SLOTS)
    sys.stdout.write(f"{port.address}\n")
    sys.stdout.flush()
    (mail,) = mail_of(port, 1)
    port.send(mail.peer, b"here")
    mail_of(port, 1)


if __name__ == "__main__":
    main()
