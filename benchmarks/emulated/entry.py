"""Entry of an emulated rank: it ends with the launcher, enters its node's network and runs the user's program.

Run as a script with -I -S, so that it starts in a few milliseconds and imports nothing but the standard library:

    python -I -S entry.py '{"parent": pid, "namespace": name or null, "hostname": name, "hosts": text}' argv...

argv is handed to the same Python.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import tempfile

_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its launcher dies, however it dies."""
    _call(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def enter_node(namespace: str, hostname: str, hosts: str) -> None:
    """Join the network namespace, and take the node's own host name and /etc/hosts in private namespaces."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    os.setns(descriptor, os.CLONE_NEWNET)
    os.close(descriptor)
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWUTS)
    socket.sethostname(hostname)
    _mount(None, b"/", _MS_REC | _MS_PRIVATE)
    with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps the file after its name is gone
        file.write(hosts)
        file.flush()
        os.chmod(file.name, 0o644)
        _mount(os.fsencode(file.name), b"/etc/hosts", _MS_BIND)


def _mount(source: bytes | None, target: bytes, flags: int) -> None:
    _call(_libc.mount(source, target, None, ctypes.c_ulong(flags), None), f"mount on {target.decode()}")


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    node = json.loads(sys.argv[1])
    die_with_parent(node["parent"])
    if node["namespace"] is not None:
        enter_node(node["namespace"], node["hostname"], node["hosts"])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
