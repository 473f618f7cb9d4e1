"""Settings of layer balancing. Each field is one command-line flag."""

from dataclasses import dataclass, field

from balancing.layers.gate import GateConfig

__all__ = ["LayerConfig"]


@dataclass(frozen=True)
class LayerConfig:
    """The settings of layer balancing. Raises ValueError for a value out of range."""

    balance_layers: bool = field(
        default=False,
        metadata={
            "help": "Move layers between pipeline stages while training, so that stages cost the same. Losses do not "
            "change; with dropout, masks differ after a move."
        },
    )
    balance_layers_once: bool = field(
        default=False,
        metadata={
            "help": "As --balance-layers, but settle the layout once, from the first --layer-balance-interval "
            "iterations, and print it as Megatron-LM's --pipeline-model-parallel-layout."
        },
    )
    layer_planner: str = field(
        default="optimal",
        metadata={
            "choices": ["optimal", "diffusion", "uniform"],
            "help": "optimal: minimize the time of the slowest stage, exactly. diffusion: neighbouring stages exchange "
            "single layers. uniform: equal numbers of layers.",
        },
    )
    layer_cost: str = field(
        default="time",
        metadata={
            "choices": ["time", "parameters"],
            "help": "The cost of a layer: its measured time, forward and backward, or its number of parameters.",
        },
    )
    layer_balance_interval: int = field(
        default=50, metadata={"metavar": "N", "help": "Measure for N iterations, then decide whether layers move."}
    )
    layer_min_gain: float = field(
        default=0.03,
        metadata={
            "metavar": "X",
            "help": "Move layers only if that is predicted to save at least this fraction of the time of a step.",
        },
    )
    repack_throughput_floor: float | None = field(
        default=None,
        metadata={
            "type": float,
            "metavar": "X",
            "help": "Continue with fewer pipeline stages as soon as that takes fewer GPU-hours and keeps at least this "
            "fraction of the throughput, such as 0.9. Ranks that are no longer needed exit with code 0, and under "
            "SLURM their nodes are returned. Needs --balance-layers.",
        },
    )
    repack_memory_limit: float | None = field(
        default=None,
        metadata={
            "type": float,
            "metavar": "GB",
            "help": "10^9 bytes a rank may use with fewer stages (default: what torch can have of the GPU). Without "
            "--repack-throughput-floor, the pipeline gets as short as fits and saves GPU-hours.",
        },
    )
    repack_min_stages: int = field(
        default=1, metadata={"metavar": "P", "help": "Fewest pipeline stages that may remain."}
    )

    def __post_init__(self) -> None:
        if self.layer_balance_interval < 1:
            raise ValueError(f"--layer-balance-interval {self.layer_balance_interval} must be at least 1")
        if not 0 <= self.layer_min_gain < 1:
            raise ValueError(f"--layer-min-gain {self.layer_min_gain} must be at least 0 and below 1")
        if self.repack_throughput_floor is not None and not 0 < self.repack_throughput_floor <= 1:
            raise ValueError(
                f"--repack-throughput-floor {self.repack_throughput_floor} must be above 0 and at most 1, such as 0.9"
            )
        if self.repack_memory_limit is not None and not 0 < self.repack_memory_limit < float("inf"):
            raise ValueError(f"--repack-memory-limit {self.repack_memory_limit} must be above 0, in 10^9 bytes")
        if self.repack_min_stages < 1:
            raise ValueError(f"--repack-min-stages {self.repack_min_stages} must be at least 1")

    @property
    def enabled(self) -> bool:
        """Whether layers are balanced."""
        return self.balance_layers or self.balance_layers_once

    @property
    def gate(self) -> GateConfig:
        """The gate of a training run: one decision an interval, and no two moves within one."""
        return GateConfig(min_gain=self.layer_min_gain, interval=self.layer_balance_interval)

    @property
    def repacks(self) -> bool:
        """Whether the pipeline may get shorter, and ranks leave."""
        return self.repack_throughput_floor is not None or self.repack_memory_limit is not None
