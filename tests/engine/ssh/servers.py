"""Real ssh servers on hosts that scripts/hosts has made."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")


@contextmanager
def ssh_servers(network: str, folder: Path, hosts: int, environment: str) -> Iterator[str]:
    """Starts sshd on each host, whose processes get variables "A=1 B=2"; gives the command that reaches them.

    Where there is no sshd the test is skipped.
    """
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd here; install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "client").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n"
        "StrictHostKeyChecking accept-new\nLogLevel ERROR\n"
    )
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(hosts):
            config = folder / f"sshd-{host}"
            config.write_text(
                f"ListenAddress 10.97.0.{host + 1}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
                f"StrictModes no\nUsePAM no\nPidFile none\nSetEnv HEADRACE_HOST=host-{host} {environment}\n"
            )
            servers.append(subprocess.Popen(there(network, host, [SSHD, "-D", "-e", "-f", str(config)])))
        yield f"ssh -F {folder}/client"
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def there(network: str, host: int, command: Sequence[str]) -> list[str]:
    """Returns the command as it runs on a host."""
    return ["ip", "netns", "exec", f"{network}-{host}", *command]
