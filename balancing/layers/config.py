"""What a user can set about layers and pipeline stages. Each field is one command-line flag."""

from dataclasses import dataclass, field

__all__ = ["LayerConfig"]


@dataclass(frozen=True)
class LayerConfig:
    """Raises ValueError for a value out of range."""

    balance_layers: bool = field(
        default=False,
        metadata={
            "help": "Move layers between pipeline stages while training, so that stages cost the same. Losses do not "
            "change, but for dropout, which then draws from a stream of each layer's own."
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
            "choices": ["optimal", "diffusion", "deepspeed", "uniform"],
            "help": "optimal: the least time of the slowest stage, exactly. diffusion: neighbours hand over single "
            "layers. deepspeed: as DeepSpeed partitions. uniform: equal numbers of layers.",
        },
    )
    layer_cost: str = field(
        default="time",
        metadata={
            "choices": ["time", "parameters"],
            "help": "What a layer costs: its measured time, forward and backward, or its parameters.",
        },
    )
    layer_balance_interval: int = field(
        default=50, metadata={"metavar": "N", "help": "Measure for N iterations, then decide whether layers move."}
    )
    layer_min_gain: float = field(
        default=0.03,
        metadata={
            "metavar": "X",
            "help": "Move layers only where that is predicted to take at least this share off the time of a step.",
        },
    )

    def __post_init__(self) -> None:
        if self.layer_balance_interval < 1:
            raise ValueError(f"--layer-balance-interval {self.layer_balance_interval} must be at least 1")
        if not 0 <= self.layer_min_gain < 1:
            raise ValueError(f"--layer-min-gain {self.layer_min_gain} must be at least 0 and below 1")

    @property
    def on(self) -> bool:
        """Whether layers are to be balanced at all."""
        return self.balance_layers or self.balance_layers_once
