"""Settings of layer balancing."""

from dataclasses import dataclass

from balancing.layers.gate import GateConfig
from balancing.layers.plan import PLANNERS
from balancing.settings import check_settings, setting

__all__ = ["LayerConfig"]


@dataclass(frozen=True)
class LayerConfig:
    """Settings of layer balancing. Raises SettingError, a ValueError, for a value out of range."""

    enabled: bool = setting(
        False,
        "Move layers between pipeline stages while training, so that all stages take equally long. Losses do not "
        "change; with dropout, masks differ after a move.",
        flag="--balance-layers",
    )
    once: bool = setting(
        False,
        "Like --balance-layers, but choose the layout only once, after the first --layer-balance-interval iterations, "
        "and print it as Megatron-LM's --pipeline-model-parallel-layout.",
        flag="--balance-layers-once",
    )
    planner: str = setting(
        "optimal",
        "optimal: the exact minimum of the slowest stage's time. diffusion: neighbouring stages exchange single "
        "layers. uniform: equal numbers of layers.",
        choices=PLANNERS,
    )
    interval: int = setting(
        50,
        "Measure for N iterations, then decide whether layers move.",
        flag="--layer-balance-interval",
        metavar="N",
        least=1,
    )
    min_gain: float = setting(
        0.03,
        "Move layers only if the predicted saving is at least this fraction of the step time.",
        least=0,
        below=1,
    )
    repack_throughput_floor: float | None = setting(
        None,
        "Continue with fewer pipeline stages once that takes fewer GPU-hours and keeps at least this fraction of the "
        "throughput, such as 0.9. Unneeded ranks exit with code 0, and SLURM gets their nodes back. Needs "
        "--balance-layers.",
        flag="--repack-throughput-floor",
        metavar="X",
        above=0,
        most=1,
    )
    repack_memory_limit: float | None = setting(
        None,
        "10^9 bytes that a rank may use with fewer stages (default: the GPU memory that torch can get). Without "
        "repack_throughput_floor, the pipeline gets as short as the memory allows while that saves GPU-hours.",
        above=0,
    )
    repack_min_stages: int = setting(1, "Fewest pipeline stages that may remain.", least=1)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def gate(self) -> GateConfig:
        """The gate of a training run: one decision per interval, and at most one move within an interval."""
        return GateConfig(min_gain=self.min_gain, interval=self.interval)

    @property
    def repacks(self) -> bool:
        """Whether the pipeline may get shorter, so that ranks leave."""
        return self.repack_throughput_floor is not None or self.repack_memory_limit is not None
