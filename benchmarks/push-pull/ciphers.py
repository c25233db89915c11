"""Processor time to seal and open a MiB: by CURVE's cipher, as ZeroMQ uses it, and by AES-256-GCM. See README.md.

It needs `pip install cryptography` beside headrace.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MIB = 1 << 20
TURNS, TIMES = 9, 60


def curve(data: bytes, key: bytes) -> dict[str, Callable[[], object]]:
    """Returns what seals and opens, in the libsodium that pyzmq brings."""
    (library,) = (Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libsodium*")
    sodium, nonce = ctypes.CDLL(str(library)), os.urandom(24)
    sodium.sodium_init()
    sealed, opened = ctypes.create_string_buffer(MIB + 16), ctypes.create_string_buffer(MIB)

    def seal() -> object:
        return sodium.crypto_box_easy_afternm(sealed, data, ctypes.c_ulonglong(MIB), nonce, key)

    def unseal() -> object:
        return sodium.crypto_box_open_easy_afternm(opened, sealed, ctypes.c_ulonglong(MIB + 16), nonce, key)

    assert (seal(), unseal(), opened.raw) == (0, 0, data)
    return {"CURVE, seal": seal, "CURVE, open": unseal}


def aes(data: bytes, key: bytes) -> dict[str, Callable[[], object]]:
    """Returns what seals and opens, in OpenSSL: into new memory, and into memory that is there."""
    cipher, nonce = AESGCM(key), os.urandom(12)
    sealed, there, opened = cipher.encrypt(nonce, data, None), bytearray(MIB + 16), bytearray(MIB)
    return {
        "AES-256-GCM, seal": lambda: cipher.encrypt(nonce, data, None),
        "AES-256-GCM, open": lambda: cipher.decrypt(nonce, sealed, None),
        "AES-256-GCM, seal into a buffer": lambda: cipher.encrypt_into(nonce, data, None, there),
        "AES-256-GCM, open into a buffer": lambda: cipher.decrypt_into(nonce, sealed, None, opened),
    }


def main() -> None:
    data, key = os.urandom(MIB), os.urandom(32)
    ways = {**curve(data, key), **aes(data, key)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(TIMES):
                way()
            taken[name].append(1e3 * (time.process_time() - began) / TIMES)
    for name, each in taken.items():
        print(f"{name:34}{statistics.median(each):8.3f} ms a MiB ({min(each):.3f} to {max(each):.3f})")


if __name__ == "__main__":
    main()
