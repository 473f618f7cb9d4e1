"""What a user can set about experts. Each field is one command-line flag."""

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
        default=2, metadata={"metavar": "N", "help": "Most replicas that a rank may host for one layer."}
    )
    expert_planner: str = field(
        default="quota",
        metadata={
            "choices": ["quota", "prophet", "shadow", "eplb", "none"],
            "help": "quota: replicas from the last load, tokens split exactly on the current one. prophet, shadow, "
            "eplb: as Pro-Prophet, FasterMoE and DeepSeek's EPLB do it.",
        },
    )
    expert_replica_mode: str = field(
        default="auto",
        metadata={
            "choices": ["auto", "resident", "shared"],
            "help": "resident: slots for each layer, filled once an iteration. shared: two sets of slots for all "
            "layers, filled again for each pass. auto: resident where it takes at most a quarter of the free memory.",
        },
    )
    expert_plan_interval: int = field(
        default=1,
        metadata={
            "metavar": "N",
            "help": "Place replicas anew every N iterations; 0: as often as loads have drifted by a twentieth.",
        },
    )
    expert_min_gain: float = field(
        default=0.02,
        metadata={
            "metavar": "X",
            "help": "Place replicas only where they are predicted to take at least this share off the load of the "
            "busiest rank.",
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
