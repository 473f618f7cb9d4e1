"""Settings of dynamic models. Each field is one command-line flag."""

from dataclasses import dataclass, field

__all__ = ["DynamicsConfig"]


@dataclass(frozen=True)
class DynamicsConfig:
    """The dynamic schemes of a model, all off by default. Raises ValueError for a value out of range."""

    freeze_layers: int = field(
        default=0,
        metadata={
            "metavar": "N",
            "help": "Freeze the embedding and up to N layers behind it during training. A frozen layer only runs "
            "forward: it has no backward pass, stores no activations and takes no part in gradient reduction and "
            "the optimizer's step.",
        },
    )
    freeze_layers_policy: str = field(
        default="schedule",
        metadata={
            "choices": ["schedule", "plasticity"],
            "help": "schedule: at fixed iterations. plasticity: freeze the front layer when its output has stopped "
            "changing, as Egeria does; unfreeze when the learning rate has fallen by a factor of ten.",
        },
    )
    freeze_layers_start: int = field(
        default=1, metadata={"metavar": "N", "help": "Iterations that all layers train before any may be frozen."}
    )
    freeze_layers_interval: int = field(
        default=0,
        metadata={
            "metavar": "N",
            "help": "schedule: one more layer is frozen every N iterations, 0 for all at once. plasticity: how often "
            "the front layer is measured (at least 1).",
        },
    )
    freeze_layers_until: int = field(
        default=0, metadata={"metavar": "N", "help": "All layers train again from iteration N on; 0 for never."}
    )
    freeze_layers_tolerance: float = field(
        default=0.2,
        metadata={
            "metavar": "X",
            "help": "plasticity: a layer is stationary when its plasticity changes less than this fraction of the "
            "fastest change seen.",
        },
    )
    freeze_layers_patience: int = field(
        default=4,
        metadata={
            "metavar": "N",
            "help": "plasticity: stationary measurements in a row before a layer freezes.",
        },
    )
    prune_sparsity: float = field(
        default=0.0,
        metadata={
            "metavar": "X",
            "help": "Fraction of the layers' weights that are pruned at the end, smallest magnitude in the whole "
            "model first.",
        },
    )
    prune_start: int = field(
        default=0, metadata={"metavar": "N", "help": "Iteration of the first pruning; sparsity then grows as a cubic."}
    )
    prune_end: int = field(default=0, metadata={"metavar": "N", "help": "Iteration of the last pruning."})
    prune_interval: int = field(default=100, metadata={"metavar": "N", "help": "Prune every N iterations."})
    prune_sparse_density: float = field(
        default=0.05,
        metadata={
            "metavar": "X",
            "help": "Multiply by a weight matrix as a sparse one once at most this fraction of it remains; 0 for "
            "never. benchmarks/layers/dynamics.py measures where that pays.",
        },
    )
    sparse_attention: str = field(
        default="none",
        metadata={
            "choices": ["none", "blocks", "hash"],
            "help": "blocks: each block of queries attends to the blocks of keys that its mean query scores highest. "
            "hash: to those with which it shares most hash buckets. Both to itself and the first block too.",
        },
    )
    sparse_attention_block: int = field(default=64, metadata={"metavar": "N", "help": "Tokens in a block."})
    sparse_attention_keep: int = field(
        default=4, metadata={"metavar": "N", "help": "Blocks of keys that a block of queries attends to."}
    )
    early_exit_layers: str = field(
        default="",
        metadata={
            "metavar": "N,N,...",
            "help": "Tokens may exit behind these layers (from 1). An exited token skips the layers that follow, and "
            "its loss is that of the exit.",
        },
    )
    early_exit_threshold: float = field(
        default=0.99,
        metadata={
            "metavar": "X",
            "help": "A token exits when the cosine between input and output of the layer is at least X.",
        },
    )
    early_exit_start: int = field(
        default=0, metadata={"metavar": "N", "help": "Iterations at the start in which no token exits."}
    )
    early_exit_loss_weight: float = field(
        default=1.0, metadata={"metavar": "X", "help": "Weight of the loss of exited tokens; 1 for that of others."}
    )
    mixture_of_depths: float = field(
        default=0.0,
        metadata={
            "metavar": "X",
            "help": "Fraction of the tokens that a routed layer processes, those with the highest router scores; the "
            "others bypass it. 0 for off.",
        },
    )
    mixture_of_depths_every: int = field(
        default=2, metadata={"metavar": "N", "help": "Every N-th layer is routed: N, 2N, ... (from 1)."}
    )

    def __post_init__(self) -> None:
        for name in ("freeze_layers", "freeze_layers_interval", "freeze_layers_until", "prune_start", "prune_end"):
            self._at_least(name, 0)
        for name in ("freeze_layers_start", "freeze_layers_patience", "prune_interval", "sparse_attention_block"):
            self._at_least(name, 1)
        for name in ("sparse_attention_keep", "mixture_of_depths_every"):
            self._at_least(name, 1)
        for name in ("early_exit_start", "early_exit_loss_weight"):
            self._at_least(name, 0)
        for name in ("prune_sparsity", "mixture_of_depths"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} {getattr(self, name)} must be at least 0 and below 1")
        for name in ("prune_sparse_density", "freeze_layers_tolerance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{_flag(name)} {getattr(self, name)} must lie between 0 and 1")
        if not -1 <= self.early_exit_threshold <= 1:
            raise ValueError(f"--early-exit-threshold {self.early_exit_threshold} must lie between -1 and 1")
        if self.prune_sparsity and self.prune_end < self.prune_start:
            raise ValueError(
                f"--prune-end {self.prune_end} lies before --prune-start {self.prune_start}; name a later iteration"
            )
        if self.freeze_layers_until and self.freeze_layers_until <= self.freeze_layers_start:
            raise ValueError(
                f"--freeze-layers-until {self.freeze_layers_until} must lie behind --freeze-layers-start "
                f"{self.freeze_layers_start}; 0 never unfreezes"
            )
        if self.freeze_layers and self.freeze_layers_policy == "plasticity" and not self.freeze_layers_interval:
            raise ValueError("--freeze-layers-policy plasticity needs --freeze-layers-interval, at least 1")
        self.exits()

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"{_flag(name)} {getattr(self, name)} must be at least {least}")

    def exits(self) -> tuple[int, ...]:
        """The layers (from 1) behind which tokens may exit, ascending. Raises ValueError if they are no numbers."""
        try:
            layers = tuple(sorted({int(part) for part in self.early_exit_layers.split(",") if part.strip()}))
        except ValueError:
            raise ValueError(
                f"--early-exit-layers {self.early_exit_layers} must be layer numbers with commas between, as in 4,8"
            ) from None
        if layers and layers[0] < 1:
            raise ValueError(f"--early-exit-layers {self.early_exit_layers}: layers count from 1")
        return layers

    @property
    def any(self) -> bool:
        """Whether a scheme is on."""
        return bool(
            self.freeze_layers
            or self.prune_sparsity
            or self.sparse_attention != "none"
            or self.early_exit_layers
            or self.mixture_of_depths
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
