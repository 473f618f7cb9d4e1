"""Emulated nodes: Linux network namespaces with rate-limited network cards.

A NIC is a veth link into one bridge, the fabric, with a token bucket on each of its two ends: one limits what leaves
the node, the other what comes to it. Ranks of one node reach each other without limit.

Each NIC is a namespace of its own, and a node with several NICs is several namespaces joined by an unlimited bridge.
One namespace with several NICs would not do: gloo listens on the NIC it is bound to, but does not bind the sockets
with which it connects, so the kernel would send half of all connections through the first NIC, whatever
GLOO_SOCKET_IFNAME says. In a namespace that holds one NIC alone, all traffic of a rank goes through the NIC it is
bound to.

Names carry the launcher's process id and its start time, so a later launcher can tell what a killed one left behind.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

__all__ = ["Network", "remove_stale"]

_NAMESPACES = Path("/run/netns")
_PREFIX = "emulated"
_NAME = re.compile(r"(\w+)-(\d+)-(\d+)-.+")
_COMMAND_TIMEOUT = 300.0  # seconds for one ip or tc command, which takes milliseconds on a machine that is not busy
_MTU = 9000  # jumbo frames, as on cluster fabrics: headers take 0.7 % of the rate, not 4 %
# The fabric does not drop, so TCP has no congestion to control and no loss to look for: nothing that slows down to
# probe (BBR), after a pause, or because an acknowledgement is late.
_TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_early_retrans": "0"}

_numbers = itertools.count()  # of the networks of this process


class Network:
    """The namespaces of one emulated cluster. Nothing exists until `create`; `remove` takes everything away again."""

    def __init__(self, nodes: int, nics_per_node: int, rate: float):
        """rate: bytes/s of each NIC, each direction."""
        assert 1 <= nodes <= 250 and 1 <= nics_per_node <= 250 and rate > 0
        self.nodes, self.nics_per_node, self.rate = nodes, nics_per_node, rate
        self._prefix = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"

    @staticmethod
    def impossible() -> str | None:
        """Why this process cannot have a network of its own, in a few words; None if it can try."""
        if not os.path.isdir("/proc/self/ns"):
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "that needs root"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        return f"{' and '.join(missing)} not found (package iproute2)" if missing else None

    def namespace(self, node: int, nic: int) -> str:
        return f"{self._prefix}-node{node}-nic{nic}"

    def address(self, node: int, nic: int) -> str:
        return f"10.77.{node}.{nic + 1}"

    def interface(self, nic: int) -> str:
        return f"nic{nic}"

    def hosts(self) -> str:
        """An /etc/hosts with a name for each address: node0, node0-nic1 and so on."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for node in range(self.nodes):
            for nic in range(self.nics_per_node):
                alias = f" node{node}" if nic == 0 else ""
                for form in ("", "::ffff:"):  # TCPStore looks its peers up as mapped IPv6 addresses
                    lines.append(f"{form}{self.address(node, nic)} node{node}-nic{nic}{alias}")
        return "\n".join(lines) + "\n"

    def create(self) -> None:
        """Make namespaces, links and limits. Raises OSError with the command that failed; then nothing is left."""
        try:
            self._create()
        except BaseException:
            self.remove()
            raise

    def _create(self) -> None:
        fabric = f"{self._prefix}-fabric"
        every = [(node, nic) for node in range(self.nodes) for nic in range(self.nics_per_node)]
        _batch(["ip"], [f"netns add {fabric}"] + [f"netns add {self.namespace(*each)}" for each in every])
        links = ["link add name fabric type bridge", f"link set dev fabric mtu {_MTU} up"]
        limits = []
        for node, nic in every:
            if self.nics_per_node > 1 and nic == 0:
                links += [f"link add name node{node} type bridge", f"link set dev node{node} up"]
            inside, port = self.namespace(node, nic), f"n{node}-{nic}"
            links.append(f"link add name {port} type veth peer name {self.interface(nic)} netns {inside}")
            links.append(f"link set dev {port} mtu {_MTU} master fabric addrgenmode none up")
            limits.append(f"qdisc add dev {port} {self._limit()}")
            if self.nics_per_node > 1:
                links.append(f"link add name i{node}-{nic} type veth peer name node netns {inside}")
                links.append(f"link set dev i{node}-{nic} mtu {_MTU} master node{node} addrgenmode none up")
        _batch(["ip", "-n", fabric], links)
        _batch(["tc", "-n", fabric], limits)
        for node, nic in every:
            self._create_nic(node, nic)

    def _create_nic(self, node: int, nic: int) -> None:
        device, address = self.interface(nic), self.address(node, nic)
        commands = [
            f"link set dev lo mtu {_MTU} up",
            f"link set dev {device} mtu {_MTU} gso_max_size {self._segment()} addrgenmode none up",
            f"addr add {address}/16 dev {device}",
        ]
        if self.nics_per_node > 1:  # the node's other NICs, by a more specific route than the fabric's
            commands += [
                f"link set dev node mtu {_MTU} addrgenmode none up",
                f"addr add {address}/32 dev node",
                f"route add 10.77.{node}.0/24 dev node src {address}",
            ]
        _batch(["ip", "-n", self.namespace(node, nic)], commands)
        inside = self.namespace(node, nic)
        _batch(["tc", "-n", inside], [f"qdisc add dev {device} {self._limit()}"])
        # A NIC holds little. With the kernel's megabytes above it (the socket's buffer) a send would be over when the
        # transfer has only begun; with as much below it (its queue), acknowledgements would wait behind the data that
        # goes the same way, and the two directions of a connection would slow each other down. 20 ms above bridge the
        # waits of a sender's thread for a busy core.
        below, above = int(max(4 * _MTU, 0.001 * self.rate)), int(max(16 * _MTU, 0.02 * self.rate))
        settings = _TCP | {"tcp_limit_output_bytes": f"{below}", "tcp_wmem": f"4096 {above} {above}"}
        writes = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items())
        _run(["ip", "netns", "exec", inside, "sh", "-c", writes])

    def _segment(self) -> int:
        """Bytes that the kernel hands the NIC at once, 1 ms of them if that is in its range."""
        return int(min(max(2 * _MTU, 0.001 * self.rate), 65536))

    def _limit(self) -> str:
        """The token bucket: a burst of 2 ms, at least two packets, and a queue that does not drop, as in a fabric with
        flow control."""
        burst = max(2 * _MTU + 100, int(self.rate * 0.002))
        return f"root tbf rate {int(self.rate * 8)}bit burst {burst} limit {64 * 2**20}"

    def remove(self) -> None:
        """Remove what this launcher has made, including whatever still runs in it. Never raises."""
        ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # a second Ctrl-C must not stop the removal halfway
        try:
            _remove([name for name in _names() if name.startswith(self._prefix + "-")])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_stale() -> list[str]:
    """Remove the namespaces of launchers that no longer live, with all processes in them. Returns the names removed."""
    stale = []
    for name in _names():
        match = _NAME.fullmatch(name)
        if match and match[1] == _PREFIX and _start_time(int(match[2])) != match[3]:
            stale.append(name)
    _remove(stale)
    return stale


def _names() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []


def _remove(names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            for pid in _run(["ip", "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            _run(["ip", "netns", "delete", name])


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot as the kernel writes it; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _batch(command: list[str], lines: list[str]) -> None:
    _run([*command, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str = "") -> str:
    """Run ip or tc. Raises OSError if it fails or hangs."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{' '.join(command)} did not finish in {_COMMAND_TIMEOUT:g} s") from error
    if done.returncode:
        first = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise OSError(f"{' '.join(command)}: {first}")
    return done.stdout
