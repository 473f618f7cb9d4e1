"""Flags of balanced experts. Each field is one command-line flag."""

from dataclasses import dataclass, field

__all__ = ["ExpertConfig"]


@dataclass(frozen=True)
class ExpertConfig:
    """Raises ValueError for a value out of range."""

    balance_experts: bool = field(
        default=False,
        metadata={
            "help": "Give hot experts replicas on other expert-parallel ranks. Routing and losses do not change."
        },
    )
    expert_replica_slots: int = field(
        default=2, metadata={"metavar": "N", "help": "Maximal number of replicas of one layer's experts on a rank."}
    )
    expert_planner: str = field(
        default="quota",
        metadata={
            "choices": ["quota", "prophet", "none"],
            "help": "quota: replicas placed from the last load, tokens divided exactly on the current one. "
            "prophet: the planner of Pro-Prophet. none: no replicas.",
        },
    )
    expert_replica_mode: str = field(
        default="auto",
        metadata={
            "choices": ["auto", "resident", "shared"],
            "help": "resident: slots for each layer, filled once an iteration. shared: two sets of slots for all "
            "layers, filled for each pass. auto: resident if that takes at most a quarter of the free memory.",
        },
    )
    expert_plan_interval: int = field(
        default=1,
        metadata={
            "metavar": "N",
            "help": "Iterations between placements of replicas; 0: whenever loads have drifted by 5 percent.",
        },
    )
    expert_min_gain: float = field(
        default=0.02,
        metadata={
            "metavar": "X",
            "help": "Place replicas only if they are predicted to lower the load of the busiest rank by at least this "
            "part.",
        },
    )

    def __post_init__(self) -> None:
        if self.expert_replica_slots < 0:
            raise ValueError(f"--expert-replica-slots {self.expert_replica_slots} must be at least 0")
        if self.expert_plan_interval < 0:
            raise ValueError(
                f"--expert-plan-interval {self.expert_plan_interval} must be at least 1, or 0 to let drift decide"
            )
        if not 0 <= self.expert_min_gain < 1:
            raise ValueError(f"--expert-min-gain {self.expert_min_gain} must be at least 0 and below 1")
