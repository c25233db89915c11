"""The network interface by which the devices' backend connects, beside the one by which headrace does."""

from __future__ import annotations

import os
import re

import pytest

from headrace.devices import DEVICES, DeviceKind
from headrace.engine.network import interfaces as network
from headrace.engine.network.interfaces import interfaces, other_interface, settle_interface, taken_by_backend
from headrace.errors import UnfitMachine

KIND = DEVICES["cuda"]
THERE = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1", "fd00::1"]}


def test_this_host_has_a_loopback_with_its_addresses() -> None:
    assert "127.0.0.1" in interfaces()["lo"]


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("", ["eth0", "eth1"]),
        ("eth", ["eth0", "eth1"]),
        ("eth1", ["eth1"]),
        ("=eth", []),
        ("=eth1,lo", ["lo", "eth1"]),
        ("^eth0,lo", ["docker0", "eth1"]),
        ("^=eth,lo", ["docker0", "eth0", "eth1"]),
        ("wlan", []),
    ],
)
def test_which_interfaces_are_taken(setting: str, taken: list[str]) -> None:
    assert taken_by_backend(setting, [*THERE]) == taken


def test_only_where_there_is_no_other_those_of_containers_and_the_loopback() -> None:
    assert taken_by_backend("", ["lo", "docker0"]) == ["lo", "docker0"]


@pytest.mark.parametrize(
    ("address", "setting", "said"),
    [
        ("10.0.0.1", "", ""),
        ("10.1.0.1", "eth1", ""),
        ("fd00::1", "=eth1", ""),
        ("10.9.9.9", "", ""),
        (
            "10.1.0.1",
            "",
            r"NCCL_SOCKET_IFNAME is not set on .*, so that nccl connects by eth0, and headrace connects by",
        ),
        ("10.0.0.1", "eth1", r"NCCL_SOCKET_IFNAME=eth1 on .* by eth1, and headrace connects by eth0 \(10.0.0.1\); set"),
    ],
)
def test_another_interface_is_said(address: str, setting: str, said: str) -> None:
    found = other_interface(KIND, address, THERE, setting)
    assert re.search(said, found) if said else not found


def test_one_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        UnfitMachine, match=r"NCCL_SOCKET_IFNAME=wlan names no network interface of .*, which has lo, do"
    ):
        other_interface(KIND, "10.0.0.1", THERE, "wlan")


def test_where_the_user_says_nothing_the_backend_connects_as_headrace_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: THERE)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    assert settle_interface(KIND, "10.1.0.1") == ""
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth1"
    # From then on it is as if the user had said it.
    assert settle_interface(KIND, "10.0.0.1").startswith("NCCL_SOCKET_IFNAME==eth1 on ")
    assert settle_interface(DeviceKind("odd", "odd device"), "10.0.0.1") == ""
