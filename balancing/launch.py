"""Facts about this job from the launcher's environment and the operating system: ranks per node, NICs, memory.

torchrun, SLURM and the emulated cluster describe a job in different environment variables. Linux describes NICs in
/sys. This module only reads both. It starts no process group and imports neither torch nor numpy, so that it works
where training does not.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Launch", "Nic", "detect_launch", "detect_nics", "host_memory"]

# Software interfaces, which are not connected to a network.
_VIRTUAL = re.compile(r"lo$|docker|podman|veth|br-|virbr|cni|flannel|cali|tun|tap|ifb|dummy|wg")


@dataclass(frozen=True)
class Launch:
    """How a job was started. `source` is "torchrun", "SLURM" or "one process"."""

    world_size: int
    ranks_per_node: int
    source: str

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node


@dataclass(frozen=True)
class Nic:
    """One network interface. `line_rate` is bytes/s in one direction, or None if the driver does not report it."""

    name: str
    line_rate: float | None
    kind: str


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Ranks and ranks per node of the job this process belongs to, from `environ` (os.environ by default).

    WORLD_SIZE with LOCAL_WORLD_SIZE (torchrun) has priority over SLURM's variables, because torchrun starts ranks
    inside SLURM tasks. Without either, the job is this one process. Raises ValueError if nodes run different numbers of
    ranks or the variables contradict each other.
    """
    environ = os.environ if environ is None else environ
    tasks = _slurm_tasks_per_node(environ)
    if "WORLD_SIZE" in environ:
        world_size = _positive(environ, "WORLD_SIZE")
        if "LOCAL_WORLD_SIZE" in environ:
            per_node, source = _positive(environ, "LOCAL_WORLD_SIZE"), "torchrun"
        elif tasks:
            per_node, source = _even(tasks), "SLURM"
        else:
            raise ValueError(
                f"WORLD_SIZE={world_size} does not say how many ranks a node runs; start with torchrun, or set "
                "LOCAL_WORLD_SIZE"
            )
    elif tasks:
        world_size, per_node, source = sum(tasks), _even(tasks), "SLURM"
    else:
        return Launch(1, 1, "one process")
    if world_size % per_node:
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {per_node}; start the same number on each node"
        )
    return Launch(world_size, per_node, source)


def detect_nics(environ: Mapping[str, str] | None = None, sys_class: Path = Path("/sys/class")) -> tuple[Nic, ...]:
    """The NICs of this node that carry training traffic, sorted by name; empty if none is found.

    In the emulated cluster: its veth interfaces, from EMULATED_NICS_PER_NODE and EMULATED_NIC_BYTES_PER_SECOND.
    Otherwise the active InfiniBand and RoCE ports that NCCL_IB_HCA allows; if there is none, hardware Ethernet, with a
    bond as one NIC. If speeds differ, only the fastest NICs count: the slower ones serve storage and management.
    """
    environ = os.environ if environ is None else environ
    if "EMULATED_NICS_PER_NODE" in environ:
        count = _positive(environ, "EMULATED_NICS_PER_NODE")
        rate = None
        if "EMULATED_NIC_BYTES_PER_SECOND" in environ:
            rate = _positive(environ, "EMULATED_NIC_BYTES_PER_SECOND")
        names = sorted(name for _, name in socket.if_nameindex() if name.startswith("nic"))
        if len(names) != count:  # without root, all traffic uses loopback and the NICs are only names
            names = [f"nic{index}" for index in range(count)]
        return tuple(Nic(name, rate, "emulated") for name in names)
    return _fastest(_infiniband(sys_class, environ.get("NCCL_IB_HCA", ""))) or _fastest(_ethernet(sys_class))


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's memory, or the control group's limit if it is lower.

    Raises OSError if the system does not report its memory.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(Path(limit))
        if text.isdigit():
            total = min(total, int(text))
    return total


def _positive(environ: Mapping[str, str], name: str) -> int:
    try:
        value = float(environ[name])
    except ValueError:
        value = math.nan
    if not (value >= 1 and value.is_integer()):
        raise ValueError(f"environment variable {name}={environ[name]!r} must be a whole number of at least 1")
    return int(value)


def _slurm_tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Tasks on each node, from "8(x4)" or "8(x3),4"; empty outside SLURM."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return []
    tasks: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group.strip())
        if match is None or int(match[1]) < 1:
            raise ValueError(f"SLURM's tasks per node {text!r} cannot be read; expected something like 8(x4)")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _even(tasks: Sequence[int]) -> int:
    if len(set(tasks)) != 1:
        raise ValueError(f"SLURM gives the nodes different numbers of tasks ({tasks}); ask for --ntasks-per-node")
    return tasks[0]


def _read(path: Path) -> str:
    """The text of a /sys file; empty if the file is absent or the driver refuses, as for the speed of a down link."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _infiniband(sys_class: Path, wanted: str) -> list[Nic]:
    nics = []
    for device in _list(sys_class / "infiniband"):
        if not _hca_wanted(device.name, wanted):
            continue
        rates = []
        for port in _list(device / "ports"):
            if "ACTIVE" in _read(port / "state"):
                gigabits = re.match(r"[\d.]+", _read(port / "rate"))
                rates.append(float(gigabits[0]) * 1e9 / 8 if gigabits else 0.0)
        if rates:
            nics.append(Nic(device.name, sum(rates) or None, "InfiniBand or RoCE"))
    return nics


def _hca_wanted(device: str, wanted: str) -> bool:
    """Whether NCCL_IB_HCA selects `device`: a list of name prefixes, "=" for whole names, "^" for all except these.

    Ports in the list are ignored.
    """
    exclude, rest = wanted.startswith("^"), wanted.lstrip("^")
    exact = rest.startswith("=")
    names = [name.split(":")[0] for name in rest.lstrip("=").split(",") if name]
    if not names:
        return True
    return exclude != any(device == name if exact else device.startswith(name) for name in names)


def _ethernet(sys_class: Path) -> list[Nic]:
    nics, hardware = [], set()
    for entry in _list(sys_class / "net"):
        if _VIRTUAL.match(entry.name) or _read(entry / "operstate") == "down":
            continue
        if (entry / "master" / "bonding").exists():  # a member of a bond; the bond is an entry of its own
            continue
        megabits = _read(entry / "speed")
        rate = int(megabits) * 1e6 / 8 if megabits.isdigit() and int(megabits) > 0 else None
        nics.append(Nic(entry.name, rate, "Ethernet"))
        if (entry / "device").exists() or (entry / "bonding").exists():
            hardware.add(entry.name)
    # The only interface of a container may be a veth named eth0, so without hardware all interfaces count.
    return [nic for nic in nics if nic.name in hardware] or nics


def _fastest(nics: Sequence[Nic]) -> tuple[Nic, ...]:
    top = max((nic.line_rate or 0.0 for nic in nics), default=0.0)
    return tuple(nic for nic in nics if (nic.line_rate or 0.0) == top)
