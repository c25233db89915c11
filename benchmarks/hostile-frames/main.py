"""Forged, truncated, repeated, reflected and strange frames: how many of them a port takes for a link's."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from headrace.transport import remote_server as remote_port
from headrace.transport.remote_server import RemoteServerTransport
from transport.hostile import ATTACKS, NOTHING, SLOTS, Attacker, record
from transport.outside import AT_ONCE, STRANGERS, Strangers

SECRET, OTHER = b"of the run that is attacked.....", b"of some other run..............."
FRESH_EVERY = 200
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outside", type=int, default=900_000, help="by processes that reach the port")
    parser.add_argument("--inside", type=int, default=100_000, help="by a process on the path of a genuine connection")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="frames", help="of the file in results/")
    arguments = parser.parse_args()
    # A connection that is closed for breaking the rules needs no time to read why.
    remote_port._FAREWELL_S = 0.005
    began, rng = time.monotonic(), random.Random(arguments.seed)
    sent: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    strange = record(OTHER)
    port = RemoteServerTransport(SLOTS, SLOTS, secret=SECRET)

    def report() -> None:
        document = {
            "date": date.today().isoformat(),
            "arguments": vars(arguments),
            "libzmq": zmq.zmq_version(),
            "seconds": round(time.monotonic() - began, 1),
            "sent": dict(sent),
            "taken": dict(taken),
        }
        (RESULTS / f"{arguments.name}.json").write_text(json.dumps(document, indent=1) + "\n")

    strangers = Strangers(port, record(SECRET), strange, rng)
    for number in range(arguments.outside // AT_ONCE):
        kind = STRANGERS[number % len(STRANGERS)]
        heard = strangers.attack(kind)
        sent[kind] += AT_ONCE
        taken[kind] += len(heard)
        if number % 500 == 0:
            show(sent, taken)
            report()
    attacker = Attacker(port, strange, rng, quiet_s=0.1)
    for number in range(arguments.inside):
        if number % FRESH_EVERY == 0:
            attacker.close()
            attacker = Attacker(port, strange, rng, quiet_s=0.1)
            if said := attacker.attack(NOTHING):
                print(f"not even a genuine link is heard: {said}", file=sys.stderr)
                return 2
            show(sent, taken)
            report()
        kind = ATTACKS[number % len(ATTACKS)]
        wrong = attacker.attack(kind)
        sent[kind] += 1
        if wrong:
            taken[kind] += 1
            print(f"\n{wrong}", file=sys.stderr)
    attacker.close()
    port.close()
    report()
    for kind, count in sent.items():
        print(f"{kind:26}{count:10,}{taken[kind]:6,}")
    print(f"{sum(taken.values()):,} of {sum(sent.values()):,} were taken for a link's")
    return int(any(taken.values()))


def show(sent: Counter[str], taken: Counter[str]) -> None:
    print(f"\r{sum(sent.values()):,} sent, {sum(taken.values()):,} taken", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
