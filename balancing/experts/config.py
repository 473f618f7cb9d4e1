"""Settings of balanced experts."""

from dataclasses import dataclass, replace

from balancing.experts.plan import MIN_GAIN, PLANNERS
from balancing.settings import check_settings, setting

__all__ = ["ExpertConfig"]


@dataclass(frozen=True)
class ExpertConfig:
    """Settings of balanced experts. Raises SettingError, a ValueError, for a value out of range."""

    enabled: bool = setting(
        False,
        "Copy hot experts to other expert-parallel ranks and split their tokens. Routing and losses do not change.",
        flag="--balance-experts",
    )
    replica_slots: int = setting(
        2,
        "Largest number of expert replicas on a rank, per layer.",
        flag="--expert-replica-slots",
        metavar="N",
        least=0,
    )
    late_slots: int = setting(
        0,
        "Late copies on a rank: replicas that are added inside a layer, where the exact load of a micro-batch is above "
        "1.04 times the mean in spite of the planned ones. 0: none.",
        least=0,
        most=1,
    )
    planner: str = setting(
        "quota",
        "quota: replicas are placed from past loads, and tokens are divided exactly by the current load. prophet: the "
        "planner of Pro-Prophet. none: no replicas.",
        choices=PLANNERS,
    )
    replica_mode: str = setting(
        "auto",
        "resident: each layer has its own slots, filled once an iteration. shared: all layers share two sets of slots, "
        "filled for each pass. auto: resident if that takes at most a quarter of the free memory.",
        choices=("auto", "resident", "shared"),
    )
    gemm: str = setting(
        "auto",
        "Products of experts. megatron: the model's own, one expert after the other, or grouped by Transformer Engine. "
        "torch: PyTorch's grouped product. auto: the faster on this GPU, measured at the start; megatron on CPUs.",
        choices=("auto", "megatron", "torch"),
    )
    plan_interval: int = setting(1, "Iterations from one placement of replicas to the next.", least=1)
    min_gain: float = setting(
        MIN_GAIN,
        "Place replicas only if they are predicted to lower the load of the busiest rank by at least this fraction.",
        least=0,
        below=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def fitted(self, experts: int, ranks: int) -> "ExpertConfig":
        """The settings, with the default number of slots lowered to that of the experts on other ranks.

        experts: number of experts of the model.
        ranks: expert-parallel size.

        Raises ValueError, one line, if the user asked for more slots.
        """
        most = experts - experts // ranks
        if most < self.replica_slots != ExpertConfig().replica_slots:
            raise ValueError(
                f"--expert-replica-slots {self.replica_slots} (replica_slots) is more than there are experts to copy: "
                f"{experts} experts over {ranks} expert-parallel ranks leave {most} on other ranks; use at most {most}"
            )
        return replace(self, replica_slots=min(most, self.replica_slots))
