"""TCP ports that stay free between their choice and their use, which may be seconds later and in another process.

A port that the kernel chose, and that was closed again, it may choose for the next connection of any program. So ports
outside of the kernel's range are taken, and a name in the same network namespace says that they are.
"""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["reserved_ports"]

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 1024, 65535


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """`count` ports on which nothing listens, and which no other caller gets meanwhile.

    The names are sockets of Linux's abstract namespace, which end with this process. Raises OSError if all are taken.
    """
    first, last = map(int, _RANGE.read_text().split())
    outside = [*range(first - 1, _FIRST - 1, -1), *range(_LAST, last, -1)]
    with contextlib.ExitStack() as names:
        ports: list[int] = []
        for port in outside or range(_LAST, _FIRST - 1, -1):
            name = socket.socket(socket.AF_UNIX)
            try:
                name.bind(f"\0megatron-balance-port-{port}")
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those who will listen there
                    probe.bind(("", port))
            except OSError:  # another caller has it, or something listens there
                name.close()
                continue
            names.enter_context(name)
            ports.append(port)
            if len(ports) == count:
                break
        else:
            raise OSError(f"fewer than {count} ports are free")
        yield ports
