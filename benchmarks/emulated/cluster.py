"""The emulated cluster: nodes with slow NICs, and ranks started on them as torchrun would start them.

Each rank gets torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
MASTER_PORT, OMP_NUM_THREADS), GLOO_SOCKET_IFNAME = its NIC, and the cluster's shape in EMULATED_NODES,
EMULATED_RANKS_PER_NODE, EMULATED_NICS_PER_NODE, EMULATED_NIC (which one is its own) and, if the network is shaped,
EMULATED_NIC_BYTES_PER_SECOND. It imports from this repository, wherever the run is started.
"""

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.emulated.network import Network, remove_stale
from benchmarks.emulated.ports import reserved_ports
from benchmarks.emulated.processes import Command, run_ranks
from benchmarks.emulated.rate import parse_rate

__all__ = ["EmulatedCluster", "Run"]

_ROOT = str(Path(__file__).resolve().parents[2])
_ENTRY = str(Path(__file__).with_name("entry.py"))
_PORT = 29500
_MOST_NODES = 250  # nodes are counted in one byte of the address


@dataclass(frozen=True)
class Run:
    """A finished run. seconds: from the first process's start to the last one's end. output: the lines of each rank,
    stdout and stderr merged, unless they went to log files."""

    seconds: float
    output: tuple[tuple[str, ...], ...]


class EmulatedCluster:
    """Nodes, NICs and the ranks bound to them; a context manager, and all of it is gone after the block.

    with EmulatedCluster(4, 4, nics_per_node=2, nic="25MB/s") as cluster:
        run = cluster.run("script.py", ["--flag"], timeout=60)

    nodes, ranks_per_node, nics_per_node: at least 1. Ranks are bound to NICs in contiguous blocks, as GPUs are; with
    more NICs than ranks, each rank to one of its own and some to none.
    nic: the rate of each NIC in each direction, as text (see `parse_rate`) or bytes/s; None for plain loopback.

    `shaped` says whether the network is limited. Where it cannot be (no root, no ip or tc, namespaces forbidden), ranks
    talk over plain loopback and `not_shaped_because` says why.
    Raises ValueError for a bad shape or rate.

    Inside the block, SIGTERM and SIGHUP raise SystemExit if nothing else handles them, so that they also clean up.
    """

    def __init__(self, nodes: int, ranks_per_node: int, *, nics_per_node: int = 1, nic: str | float | None = None):
        for name, value in (("nodes", nodes), ("ranks per node", ranks_per_node), ("NICs per node", nics_per_node)):
            if not 1 <= value <= _MOST_NODES:
                raise ValueError(f"{name} must be 1 to {_MOST_NODES}, not {value}")
        self.nodes, self.ranks_per_node, self.nics_per_node = nodes, ranks_per_node, nics_per_node
        self.rate = parse_rate(nic) if isinstance(nic, str) else nic
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"the rate of a NIC must be finite and above 0 bytes/s, not {self.rate}")
        self.not_shaped_because: str | None = "no NIC rate was given" if self.rate is None else Network.impossible()
        self._network: Network | None = None
        self._open = contextlib.ExitStack()
        self._port = 0  # of plain loopback, reserved inside the block
        self._handlers: dict[int, Any] = {}

    @property
    def shaped(self) -> bool:
        return self._network is not None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def nic_of(self, local_rank: int) -> int:
        """The NIC that a rank of any node is bound to."""
        return local_rank * self.nics_per_node // self.ranks_per_node

    def __enter__(self) -> "EmulatedCluster":
        self._handle_signals()
        try:
            if self.not_shaped_because is None:
                self._shape()
            if not self.shaped:
                (self._port,) = self._open.enter_context(reserved_ports(1))
        except BaseException:
            self._restore_signals()
            raise
        return self

    def _shape(self) -> None:
        assert self.rate is not None
        remove_stale()
        network = Network(self.nodes, self.nics_per_node, self.rate)
        try:
            network.create()
            self._network = network
        except OSError as error:
            self.not_shaped_because = str(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._network is not None:
            self._network.remove()
            self._network = None
        self._open.close()
        self._restore_signals()

    def _handle_signals(self) -> None:
        def leave(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, leave)

    def _restore_signals(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def run(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        timeout: float | None,
        on_line: Callable[[int, str], None] | None = None,
        log_dir: str | Path | None = None,
    ) -> Run:
        """Run `python script arguments...` once a rank and wait for all. `script` may be a Python option, such as -m.

        timeout: seconds for the whole run, None for no limit. on_line(rank, line): called with each line of output
        as it comes. log_dir: write each rank's output to rank_N.log there, and do not keep it.

        Raises RankFailed for the first rank that fails and RunTimeout; all ranks have ended by then. ValueError if the
        script does not exist. Call it on the thread that outlives the run.
        """
        script = str(script)
        if not script.startswith("-") and not Path(script).is_file():
            raise ValueError(f"the script {script} does not exist")
        kept: list[list[str]] = [[] for _ in range(self.ranks)]
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            logs: list[IO[str]] = []
            if log_dir is not None:
                Path(log_dir).mkdir(parents=True, exist_ok=True)
                names = [Path(log_dir, f"rank_{rank:0{len(str(self.ranks - 1))}}.log") for rank in range(self.ranks)]
                logs = [stack.enter_context(name.open("w", buffering=1)) for name in names]

            def take(rank: int, line: str) -> None:
                if logs:
                    logs[rank].write(line + "\n")
                else:
                    kept[rank].append(line)
                if on_line is not None:
                    on_line(rank, line)

            run_ranks(self._commands([script, *arguments]), take, timeout)
        return Run(time.monotonic() - begin, tuple(map(tuple, kept)))

    def places(self) -> list[tuple[dict[str, str], dict[str, Any]]]:
        """Of each rank: the variables of its environment, and where it runs, as `entry` takes it."""
        network = self._network
        shared: dict[str, object] = {
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": network.address(0, 0) if network else "127.0.0.1",
            "MASTER_PORT": _PORT if network else self._port,
            "OMP_NUM_THREADS": 1,
            "PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": 1,
            "EMULATED_NODES": self.nodes,
            "EMULATED_RANKS_PER_NODE": self.ranks_per_node,
            "EMULATED_NICS_PER_NODE": self.nics_per_node,
        }
        if network:
            shared["EMULATED_NIC_BYTES_PER_SECOND"] = f"{network.rate:.0f}"
        places: list[tuple[dict[str, str], dict[str, Any]]] = []
        for rank in range(self.ranks):
            node, local_rank = divmod(rank, self.ranks_per_node)
            nic = self.nic_of(local_rank)
            own: dict[str, object] = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "EMULATED_NIC": nic}
            own["GLOO_SOCKET_IFNAME"] = network.interface(nic) if network else "lo"
            place: dict[str, Any] = {
                "parent": os.getpid(),
                "namespace": network.namespace(node, nic) if network else None,
                "hostname": f"node{node}",
                "hosts": network.hosts() if network else "",
            }
            places.append(({name: str(value) for name, value in (shared | own).items()}, place))
        return places

    def _commands(self, arguments: list[str]) -> list[Command]:
        commands = []
        for variables, place in self.places():
            argv = [sys.executable, "-I", "-S", _ENTRY, json.dumps(place), *arguments]
            commands.append(Command(argv, {**os.environ, **variables}))
        return commands
