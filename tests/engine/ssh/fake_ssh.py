"""Stands in for ssh: `fake_ssh.py [-oOPTION]... HOST COMMAND` runs the command here; a host's file says what is odd."""

import os
import sys

*_, host, command = sys.argv[1:]
if host == "nowhere":
    sys.stderr.write("ssh: Could not resolve hostname nowhere: Name or service not known\n")
    sys.exit(255)
if host == "silent":
    # As ssh to a host that drops every packet.
    os.execvp("sleep", ["sleep", "100"])
address = "127.0.0.1" if host == "loopback" else "0.0.0.0"
name = "twin" if host.startswith("twin") else f"host-{host}"
os.environ.update(HEADRACE_HOST=name, SSH_CONNECTION=f"10.0.0.9 1 {address} 22")
os.execvp("sh", ["sh", "-c", command])
