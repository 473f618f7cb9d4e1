"""Compute and link speeds for the planners' cost models: `Cluster` and its presets.

To decide whether a move of a layer, an expert or a piece of a sequence pays, a planner compares the time of the move
with the time of computation. Every planner therefore gets a `Cluster`. It comes from a preset, a JSON file, the launch
environment, or a measurement: `python -m balancing.cluster --measure --json cluster.json`.

All speeds are achieved speeds in one direction, not data-sheet peaks. A planner that compares a peak with an achieved
figure decides wrongly. Ranks fill nodes in order, as torchrun numbers them.
"""

import difflib
import json
import logging
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from balancing.cluster.presets import rates_of
from balancing.cluster.rates import Rates
from balancing.files import parse_json, read_text, write_text

__all__ = ["PRESETS", "Cluster"]

# Achieved fractions of the data-sheet figures, for large operations. bf16 matmul: 86 % measured on A100, 80 % on H100
# and 78 % on B200 for the best shape (github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). NVLink: 380
# of 450 GB/s, 84 %, from GPU to GPU on H100 (github.com/NVIDIA/nccl/issues/1264). A NIC loses only its protocol's
# headers.
_MATMUL_ACHIEVED = 0.80
_NVLINK_ACHIEVED = 0.80
_NIC_ACHIEVED = 0.95

# Data-sheet figures of one GPU. tflops: dense bf16; most data sheets print the sparse figure, twice as much. nvlink_gb:
# GB/s in both directions together, as marketed; one direction has half of it. memory_gb: 10^9 bytes, a little less than
# the device reports, because the CUDA context takes the rest. The GPUs of a node are connected by NVLink: a server of 8
# GPUs, or a rack of 72 in 18 compute trays.
#
# A800, H800, H200: NVIDIA's data sheets. H100: NVIDIA's data sheet of the SXM module, and the DGX H100 user guide for
# its 8 ConnectX-7. B200, B300: "NVIDIA HGX Platform", specifications of 8 GPUs: 36 PFLOPS of sparse bf16, 1.4 TB and
# 2.1 TB of memory, network of 0.8 TB/s and 1.6 TB/s in both directions. GB200, GB300: "NVIDIA GB200 NVL72" and
# "NVIDIA GB300 NVL72", specifications of 72 GPUs: 360 PFLOPS of sparse bf16, 13.4 TB and 20 TB, 130 TB/s of NVLink; the
# NVL72 reference architecture (docs.nvidia.com) for 4 GPUs and 4 ConnectX-7 or ConnectX-8 a tray.
PRESETS: dict[str, dict[str, float]] = {
    "a800-4x200g": {"gpus": 8, "nvlink_gb": 400, "nics": 4, "nic_gbit": 200, "tflops": 312, "memory_gb": 80},
    "h800-8x200g": {"gpus": 8, "nvlink_gb": 400, "nics": 8, "nic_gbit": 200, "tflops": 989, "memory_gb": 80},
    "h100-8x400g": {"gpus": 8, "nvlink_gb": 900, "nics": 8, "nic_gbit": 400, "tflops": 989, "memory_gb": 80},
    "h200-8x400g": {"gpus": 8, "nvlink_gb": 900, "nics": 8, "nic_gbit": 400, "tflops": 989, "memory_gb": 141},
    "b200-8x400g": {"gpus": 8, "nvlink_gb": 1800, "nics": 8, "nic_gbit": 400, "tflops": 2250, "memory_gb": 180},
    "b300-8x800g": {"gpus": 8, "nvlink_gb": 1800, "nics": 8, "nic_gbit": 800, "tflops": 2250, "memory_gb": 270},
    "gb200-72x400g": {"gpus": 72, "nvlink_gb": 1800, "nics": 72, "nic_gbit": 400, "tflops": 2500, "memory_gb": 186},
    "gb300-72x800g": {"gpus": 72, "nvlink_gb": 1800, "nics": 72, "nic_gbit": 800, "tflops": 2500, "memory_gb": 279},
}
_SERVER_GPUS = 8  # GPUs of a node in presets whose node is one host

# Latencies of H100 and H200, used for all presets and for files without latencies. Data sheets do not print them.
# `python -m balancing.cluster --measure` measures them on a GPU.
# - Message: NCCL's own tuning model (src/graph/tuning.cc, ring and protocol Simple) has 8.4 us a call, and 3.4 us a hop
#   over NVLink or 14 us over a network: 12 and 22 us together. The value is near the slower one.
# - Kernel launch and host operation: estimates. The smallest kernels occupy a device for 2 to 3 us, and attention also
#   fills and drains its pipeline. A launch costs the driver about 5 us. An operation of PyTorch called from Python, or
#   a Triton kernel, costs the host about twice that.
LAUNCH_SECONDS = 5e-6
MESSAGE_SECONDS = 20e-6
HOST_SECONDS = 10e-6
_LATENCIES = ("launch_seconds", "message_seconds", "host_seconds")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes.

    nodes, ranks_per_node, nics_per_node: counts, at least 1.
    intra_node_bandwidth: bytes/s that one rank sends to another in its node. May be math.inf if a node has one rank.
    nic_bandwidth: bytes/s that one NIC sends. May be math.inf if there is one node, so that nothing crosses a NIC.
    flops: FLOP/s that one rank achieves in large matrix products.
    memory: bytes of memory of one rank's device.
    launch_seconds: seconds that a kernel takes on the device besides its arithmetic: launch, first loads, last stores.
    message_seconds: seconds until the first byte of a message arrives.
    host_seconds: seconds that the host takes to start one operation on the device, from Python.
    rates: measured rates by length and rows. None: one rate for attention, FLOP/s of large products for experts.

    Raises ValueError for counts, speeds or memory that are below 1 or not finite, and for latencies that are not finite
    or below 0.
    """

    nodes: int
    ranks_per_node: int
    nics_per_node: int
    intra_node_bandwidth: float
    nic_bandwidth: float
    flops: float
    memory: float
    launch_seconds: float = LAUNCH_SECONDS
    message_seconds: float = MESSAGE_SECONDS
    host_seconds: float = HOST_SECONDS
    rates: Rates | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "nics_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        unneeded = {"intra_node_bandwidth": self.ranks_per_node == 1, "nic_bandwidth": self.nodes == 1}
        for name in ("intra_node_bandwidth", "nic_bandwidth", "flops", "memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 1:
                raise ValueError(f"{name}={value!r} must be a positive number of {_unit(name)}, at least 1")
            if value == math.inf and not unneeded.get(name, False):
                raise ValueError(
                    f"{name} is not known, and {self.nodes} node(s) of {self.ranks_per_node} rank(s) need it; measure "
                    f"with as many nodes and ranks, or write it in {_unit(name)} into the cluster's JSON file"
                )
        for name in _LATENCIES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise ValueError(f"{name}={value!r} must be a number of seconds of at least 0")

    @property
    def world_size(self) -> int:
        """Number of ranks of the cluster."""
        return self.nodes * self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node of `rank`. All methods with a rank raise ValueError for a rank outside the cluster."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a cluster of {self.world_size} ranks (0 to {self.world_size - 1})")
        return rank // self.ranks_per_node

    def nics(self, rank: int) -> tuple[int, ...]:
        """The NICs that `rank` sends through, numbered over the whole cluster: NIC i is on node i // nics_per_node.

        If a node has fewer NICs than ranks, neighbouring ranks share a NIC. If it has more, a rank has several.
        """
        node, local = self.node(rank), rank % self.ranks_per_node
        first = local * self.nics_per_node // self.ranks_per_node
        last = max(first + 1, (local + 1) * self.nics_per_node // self.ranks_per_node)
        return tuple(range(node * self.nics_per_node + first, node * self.nics_per_node + last))

    def nic(self, rank: int) -> int:
        """The first of the rank's `nics`, which is the only one unless a node has more NICs than ranks."""
        return self.nics(rank)[0]

    def same_node(self, a: int, b: int) -> bool:
        """Whether ranks `a` and `b` run on one node."""
        return self.node(a) == self.node(b)

    def bandwidth(self, src: int, dst: int) -> float:
        """Bytes/s of a single transfer from rank `src` to rank `dst` with all links otherwise idle; inf to itself.

        Ranks that share a NIC also share its rate. For several transfers, add up the bytes of each `nic` and divide by
        nic_bandwidth.
        """
        if self.same_node(src, dst):
            return math.inf if src == dst else self.intra_node_bandwidth
        return self.nic_bandwidth * min(len(self.nics(src)), len(self.nics(dst)))

    @classmethod
    def preset(cls, name: str, *, nodes: int = 1) -> Self:
        """A known machine from `PRESETS`. Its name has the GPU, the NICs of a node, and the Gbit/s of a NIC.

        A node has 8 GPUs. For GB200 and GB300 a node is the rack of 72 GPUs that NVLink connects. Speeds are fractions
        of the data-sheet figures for one direction: 80 % for bf16 matmul and NVLink, 95 % for NICs. Rates by length are
        those of `presets.rates_of`. Raises ValueError for an unknown name.
        """
        if name not in PRESETS:
            hint = _did_you_mean(name, PRESETS)
            raise ValueError(f"unknown cluster preset {name!r}{hint}; known: {', '.join(PRESETS)}")
        sheet = PRESETS[name]
        return cls(
            nodes=nodes,
            ranks_per_node=int(sheet["gpus"]),
            nics_per_node=int(sheet["nics"]),
            intra_node_bandwidth=sheet["nvlink_gb"] * 1e9 / 2 * _NVLINK_ACHIEVED,
            nic_bandwidth=sheet["nic_gbit"] * 1e9 / 8 * _NIC_ACHIEVED,
            flops=sheet["tflops"] * 1e12 * _MATMUL_ACHIEVED,
            memory=sheet["memory_gb"] * 1e9,
            rates=rates_of(name, sheet["tflops"]),
        )

    @classmethod
    def sheet(cls, name: str, *, nodes: int = 1) -> Self:
        """As `preset`, without measured rates: attention of any length runs at one rate."""
        return replace(cls.preset(name, nodes=nodes), rates=None)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of `to_json` or `python -m balancing.cluster --measure --json`.

        The file has one JSON object with every field of the class, and optionally "about", a note for readers. A
        bandwidth that is not needed may be null. Latencies may be missing or null, for the defaults. Without "rates",
        as in files of older releases, a warning says what is assumed; null assumes the same without a warning. Raises
        ValueError that names the file and the key for anything else.
        """
        path = Path(path)
        try:
            text = read_text(path)
        except ValueError as error:
            raise ValueError(f"cluster file {path} {error}") from error
        try:
            raw = parse_json(text)
        except ValueError as error:
            raise ValueError(f"cluster file {path} is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ValueError(f"cluster file {path} must hold one JSON object, not {raw!r:.60}")
        names = [field.name for field in fields(cls)]
        for key in raw:
            if key not in (*names, "about"):
                raise ValueError(f"cluster file {path}: unknown key {key!r}{_did_you_mean(key, names)}")
        optional = (*_LATENCIES, "rates")
        if missing := [name for name in names if name not in raw and name not in optional]:
            raise ValueError(
                f"cluster file {path}: missing {', '.join(f'{name!r} ({_unit(name)})' for name in missing)}; "
                "write a complete file with python -m balancing.cluster --measure --json FILE"
            )
        if "rates" not in raw:
            _LOGGER.warning(
                "cluster file %s has no 'rates': attention of any length is assumed to run at 0.6 of flops, experts at "
                "flops; measure them with python -m balancing.cluster --measure --json FILE", path
            )  # fmt: skip
        values: dict[str, Any] = {name: raw[name] for name in names if name not in optional}
        values |= {name: raw[name] for name in _LATENCIES if raw.get(name) is not None}
        for name in ("intra_node_bandwidth", "nic_bandwidth"):
            values[name] = math.inf if values[name] is None else values[name]
        try:
            return cls(**values, rates=None if raw.get("rates") is None else Rates.from_json(raw["rates"]))
        except ValueError as error:
            raise ValueError(f"cluster file {path}: {error}") from error

    def to_json(self, path: str | os.PathLike[str], *, about: Mapping[str, str] | None = None) -> None:
        """Write a file for `from_json`. about: notes for readers, such as the source of the figures.

        Raises ValueError if the file cannot be written.
        """
        content: dict[str, Any] = {}
        for name, value in asdict(replace(self, rates=None)).items():
            if name == "rates":
                content[name] = None if self.rates is None else self.rates.to_json()
                continue
            number = int(value) if isinstance(value, numbers.Integral) else float(value)  # NumPy's are not JSON
            content[name] = None if number == math.inf else number
        if about:
            content["about"] = dict(about)
        write_text(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def from_spec(cls, text: str, world_size: int, *, ranks_per_node: int | None = None) -> Self:
        """The cluster of the flag `--cluster PRESET|FILE.json` for a job of `world_size` ranks.

        text: a preset or the path of a file.
        ranks_per_node: ranks that the launcher started on each host; None if they are those of the preset or file.

        The number of nodes follows from the world size. All hosts of an NVL72 rack are one node. The job is assumed to
        be in as few racks as can hold it in equal parts, with ranks in the order of racks. Raises ValueError for an
        unknown preset, a bad file, and a world size that does not fill whole nodes.
        """
        if text in PRESETS:
            cluster = cls.preset(text)
        elif text.endswith(".json") or Path(text).is_file():
            cluster = cls.from_json(text)
        else:
            raise ValueError(
                f"--cluster {text!r} is neither a preset{_did_you_mean(text, PRESETS)} nor a .json file; "
                f"presets: {', '.join(PRESETS)}"
            )
        per_node = cluster.ranks_per_node if ranks_per_node is None else ranks_per_node
        if text in PRESETS and cluster.ranks_per_node > _SERVER_GPUS:
            per_node = _ranks_in_rack(world_size, cluster.ranks_per_node, min(per_node, cluster.ranks_per_node))
        if per_node < 1 or world_size < 1 or world_size % per_node:
            raise ValueError(
                f"a world size of {world_size} does not fill whole nodes of {per_node} ranks (--cluster {text}); "
                f"start a multiple of {per_node} ranks, or describe your nodes in a file: "
                "python -m balancing.cluster --measure --json FILE, then --cluster FILE"
            )
        return cluster.relabel(world_size // per_node, per_node)

    def relabel(self, nodes: int, ranks_per_node: int) -> Self:
        """The same hardware with another number of nodes and of ranks on each node.

        If a node has fewer ranks than devices, the job uses only the NICs next to the used devices.
        """
        fewer = min(1.0, ranks_per_node / self.ranks_per_node)
        nics = max(1, round(self.nics_per_node * fewer))
        return replace(self, nodes=nodes, ranks_per_node=ranks_per_node, nics_per_node=nics)

    def with_kernel(self, *names: str) -> Self:
        """The same hardware with attention planned as the kernel `names` computes it, if its rates are known.

        names: of `Rates.attention`, as in `balancing.kernels.choice`: "fa2", "fa3", "cudnn". Of several the fastest
            on long documents.
        """
        known = [name for name in names if self.rates is not None and name in dict(self.rates.attention)]
        if self.rates is None or not known:
            return self
        return min((replace(self, rates=replace(self.rates, kernel=name)) for name in known), key=_long_seconds)

    def with_gemm(self, name: str) -> Self:
        """The same hardware with experts planned as the products `name` of `Rates.products` compute them, if their
        rates are known."""
        if self.rates is None or name not in dict(self.rates.products):
            return self
        return replace(self, rates=replace(self.rates, gemm=name))


def _long_seconds(cluster: Cluster) -> float:
    """Seconds of a FLOP of attention on long documents and of the 2.5 of its backward pass."""
    assert cluster.rates is not None
    return 1 / cluster.rates.forward.flops + 2.5 / cluster.rates.backward.flops


def _ranks_in_rack(world_size: int, rack: int, host: int) -> int:
    """Ranks of a job in each rack, if the job is in as few racks as can hold it in equal parts of whole hosts."""
    for racks in range(-(-world_size // rack), world_size // host + 1):
        if world_size % (racks * host) == 0:
            return world_size // racks
    return host


def _unit(name: str) -> str:
    known = {"flops": "FLOP/s", "memory": "bytes"} | dict.fromkeys(_LATENCIES, "seconds")
    return known.get(name, "bytes/s" if name.endswith("bandwidth") else "count")


def _did_you_mean(name: str, known: Any) -> str:
    close = [key for key in known if name and key.startswith(name)] or difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
