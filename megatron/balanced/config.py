"""The flags of this package as one frozen dataclass, and the cluster that they describe.

The flags of each balancer are a dataclass of `balancing`. `megatron.balanced.arguments` makes flags of all fields.
"""

import argparse
import dataclasses

from balancing.cluster import PRESETS, Cluster
from balancing.dynamics.config import DynamicsConfig
from balancing.experts.config import ExpertConfig
from balancing.launch import detect_launch
from balancing.layers.config import LayerConfig
from balancing.sequences.config import SequenceConfig

__all__ = ["BalanceConfig", "cluster_from_flags", "config_from_flags"]


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """The values of this package's flags. Each field is one flag, or the flags of one balancer."""

    device: str = dataclasses.field(
        default="auto",
        metadata={
            "choices": ["auto", "cuda", "cpu"],
            "help": "Where to train. auto takes CUDA when there is one. On cpu, Megatron-LM runs over gloo.",
        },
    )
    fp64: bool = dataclasses.field(
        default=False,
        metadata={"help": "Train in float64, as an exact reference to compare other runs with (cpu only)."},
    )
    balance: str | None = dataclasses.field(
        default=None,
        metadata={
            "metavar": "all|LIST",
            "help": "Balancers to switch on, such as experts,layers. all: every one that has something to balance and "
            "works with the other flags; what stays off is said once. The flag of each balancer does the same for it.",
        },
    )
    balance_report: str | None = dataclasses.field(
        default=None,
        metadata={
            "metavar": "DIR",
            "help": "Measure who is slow, why and by how much, and write events.jsonl and trace.json into DIR. "
            "Works with every balancer off. Read it with: python -m balancing.report DIR",
        },
    )
    balance_report_interval: int = dataclasses.field(
        default=10,
        metadata={
            "metavar": "N",
            "help": "Gather and write the report's measurements of N iterations at a time. None is left out: N only "
            "says how many may be lost when the job is killed.",
        },
    )
    cluster: str | None = dataclasses.field(
        default=None,
        metadata={
            "metavar": "PRESET|FILE",
            "help": "Compute and link speeds for the planners' cost model: "
            f"{', '.join(PRESETS)}, or a file that python -m balancing.cluster --measure wrote. Without it "
            "sequences are planned for H200 GPUs, and the other plans balance load and leave costs out.",
        },
    )
    balance_dry_run: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Print what would be patched in Megatron-LM, which ranks would plan together and the memory of "
            "replica slots, and stop before training. Without a launcher, WORLD_SIZE ranks on GPUs are assumed."
        },
    )
    experts: ExpertConfig = dataclasses.field(default_factory=ExpertConfig)
    sequences: SequenceConfig = dataclasses.field(default_factory=SequenceConfig)
    layers: LayerConfig = dataclasses.field(default_factory=LayerConfig)
    dynamics: DynamicsConfig = dataclasses.field(default_factory=DynamicsConfig)

    @property
    def balances(self) -> bool:
        """Whether any balancer is on."""
        return self.experts.balance_experts or self.sequences.balance_sequences or self.layers.enabled


def config_from_flags(args: argparse.Namespace, device: str) -> BalanceConfig:
    """The config that parsed flags give. device: "cuda" or "cpu", in the place of "auto"."""
    config: BalanceConfig = _read(args, BalanceConfig)
    return dataclasses.replace(
        config,
        device=device,
        experts=_read(args, ExpertConfig),
        sequences=_read(args, SequenceConfig),
        layers=_read(args, LayerConfig),
        dynamics=_read(args, DynamicsConfig),
    )


def _read[T](args: argparse.Namespace, cls: type[T]) -> T:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: getattr(args, field.name) for field in fields if field.metadata})


def cluster_from_flags(config: BalanceConfig, world_size: int) -> Cluster | None:
    """The cluster that `--cluster` describes, None without that flag.

    Raises ValueError where it does not fit the ranks of this job.
    """
    if config.cluster is None:
        return None
    return Cluster.from_spec(config.cluster, world_size, ranks_per_node=detect_launch().ranks_per_node)
