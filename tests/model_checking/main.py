"""Explores every state of the protocols, and says how many there are: scripts/check-protocols."""

from __future__ import annotations

import argparse
import gc
import sys
from time import perf_counter

from model_checking.explorer import Counterexample, TooMany, explore
from model_checking.protocols import PROTOCOLS

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Returns 1 if a protocol does wrong, 2 if one has more states than were to be explored."""
    parser = argparse.ArgumentParser(prog="scripts/check-protocols", description=__doc__)
    parser.add_argument("words", nargs="*", help="those whose name has one of the words, instead of all")
    parser.add_argument("--small", action="store_true", help="the bounds of the tests")
    parser.add_argument("--most", type=int, default=2_000_000, help="states of a protocol, at most")
    given = parser.parse_args(arguments)
    chosen = {name: each for name, each in PROTOCOLS.items() if not given.words or any(w in name for w in given.words)}
    if not chosen:
        parser.error(f"no protocol has one of {given.words}; there are: {'; '.join(PROTOCOLS)}")
    # The states are kept until the end, so that a collection of garbage would find none.
    gc.disable()
    code = 0
    print(f"{'protocol':34}{'states':>10}{'transitions':>13}{'depth':>7}{'seconds':>9}")
    for name, protocol in chosen.items():
        began = perf_counter()
        try:
            found = explore(protocol.small() if given.small else protocol.full(), given.most)
        except Counterexample as error:
            print(f"{name}: {error}")
            code = 1
        except TooMany as error:
            print(f"{name:34}{error}; {perf_counter() - began:.1f} s")
            code = code or 2
        else:
            print(f"{name:34}{found.states:10,}{found.transitions:13,}{found.depth:7}{found.seconds:9.1f}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
