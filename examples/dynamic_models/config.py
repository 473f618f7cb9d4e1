"""Settings of dynamic models, each of which is a flag: `--freeze-layers` sets `freeze_layers`."""

import argparse
import dataclasses
from typing import Any

from balancing.settings import SettingError, check_settings, setting

__all__ = ["DynamicsConfig", "add_flags", "config_of", "shown"]


@dataclasses.dataclass(frozen=True)
class DynamicsConfig:
    """The dynamic schemes of a model, all off by default.

    Raises SettingError, a ValueError, for a value out of range and for schemes that exclude each other.
    """

    freeze_layers: int = setting(
        0,
        "Freeze the embedding and up to N layers after it during training. A frozen layer only runs forward: it has "
        "no backward pass, stores no activations and takes no part in gradient reduction and the optimizer's step.",
        least=0,
    )
    freeze_layers_policy: str = setting(
        "schedule",
        "schedule: at fixed iterations. plasticity: freeze the front layer when its output has stopped changing, as "
        "Egeria does; unfreeze when the learning rate has fallen by a factor of ten.",
        choices=("schedule", "plasticity"),
        needs="freeze_layers",
    )
    freeze_layers_start: int = setting(
        1,
        "Iterations that all layers train before any may be frozen.",
        needs="freeze_layers",
        least=1,
    )
    freeze_layers_interval: int = setting(
        0,
        "schedule: one more layer is frozen every N iterations, 0 for all at once. plasticity: how often the front "
        "layer is measured (at least 1).",
        needs="freeze_layers",
        least=0,
    )
    freeze_layers_until: int = setting(
        0, "All layers train again from iteration N on; 0 for never.", needs="freeze_layers", least=0
    )
    freeze_layers_tolerance: float = setting(
        0.2,
        "plasticity: a layer is stationary when its plasticity changes less than this fraction of the fastest change "
        "seen.",
        needs="freeze_layers",
        least=0,
        most=1,
    )
    freeze_layers_patience: int = setting(
        4, "plasticity: stationary measurements in a row before a layer freezes.", needs="freeze_layers", least=1
    )
    prune_sparsity: float = setting(
        0.0,
        "Fraction of the layers' weights that are pruned at the end, smallest magnitude in the whole model first.",
        least=0,
        below=1,
    )
    prune_start: int = setting(
        0, "Iteration of the first pruning; sparsity then grows as a cubic.", needs="prune_sparsity", least=0
    )
    prune_end: int = setting(0, "Iteration of the last pruning.", needs="prune_sparsity", least=0)
    prune_interval: int = setting(100, "Prune every N iterations.", needs="prune_sparsity", least=1)
    prune_sparse_density: float = setting(
        0.05,
        "Use a sparse matrix product for a weight once at most this fraction of it remains; 0 for never. "
        "Below a tenth it pays (benchmarks/log/layers-plans.md).",
        needs="prune_sparsity",
        least=0,
        most=1,
    )
    sparse_attention: str = setting(
        "none",
        "blocks: each block of queries attends to the blocks of keys that its mean query scores highest. hash: it "
        "attends to the blocks with which it shares most hash buckets. With both, it also attends to itself and to the "
        "first block.",
        choices=("none", "blocks", "hash"),
    )
    sparse_attention_block: int = setting(64, "Tokens in a block.", needs="sparse_attention", least=1)
    sparse_attention_keep: int = setting(
        4, "Blocks of keys that a block of queries attends to.", needs="sparse_attention", least=1
    )
    early_exit_layers: tuple[int, ...] = setting(
        (),
        "Tokens may exit after these layers (from 1). An exited token skips the remaining layers, and its loss is "
        "computed from its hidden state at the exit.",
    )
    early_exit_threshold: float = setting(
        0.99,
        "A token exits when the cosine between input and output of the layer is at least X.",
        needs="early_exit_layers",
        least=-1,
        most=1,
    )
    early_exit_start: int = setting(
        0, "Number of iterations at the start in which no token exits.", needs="early_exit_layers", least=0
    )
    early_exit_loss_weight: float = setting(
        1.0, "Weight of the loss of exited tokens; 1 for that of others.", needs="early_exit_layers", least=0
    )
    mixture_of_depths: float = setting(
        0.0,
        "Fraction of the tokens that a routed layer processes, those with the highest router scores; the others bypass "
        "it. 0 for off.",
        least=0,
        below=1,
    )
    mixture_of_depths_every: int = setting(
        2, "Every N-th layer is routed: N, 2N, ... (from 1).", needs="mixture_of_depths", least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "early_exit_layers", tuple(sorted(set(self.early_exit_layers))))
        if self.early_exit_layers and self.early_exit_layers[0] < 1:
            raise SettingError("early_exit_layers", self.early_exit_layers, "must name layers from 1 on")
        if self.early_exit_layers and self.mixture_of_depths:
            raise SettingError(
                "mixture_of_depths",
                self.mixture_of_depths,
                f"is incompatible with {shown('early_exit_layers', self.early_exit_layers)}: both choose the tokens of "
                "a layer; use one of the two",
            )
        if self.prune_sparsity and self.prune_end < self.prune_start:
            raise SettingError(
                "prune_end", self.prune_end, f"is before --prune-start {self.prune_start}; name a later iteration"
            )
        if self.freeze_layers_until and self.freeze_layers_until <= self.freeze_layers_start:
            raise SettingError(
                "freeze_layers_until",
                self.freeze_layers_until,
                f"must be after --freeze-layers-start {self.freeze_layers_start}; 0 never unfreezes",
            )
        if self.freeze_layers and self.freeze_layers_policy == "plasticity" and not self.freeze_layers_interval:
            raise SettingError(
                "freeze_layers_policy", self.freeze_layers_policy, "needs --freeze-layers-interval, at least 1"
            )

    @property
    def enabled(self) -> bool:
        """Whether a scheme is on."""
        return bool(self.freeze_layers) or self.changes_otherwise

    @property
    def changes_otherwise(self) -> bool:
        """Whether a scheme other than freezing is on."""
        return bool(
            self.prune_sparsity or self.sparse_attention != "none" or self.early_exit_layers or self.mixture_of_depths
        )


def shown(name: str, value: Any) -> str:
    """A field as a user gives it on the command line."""
    words = " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return f"--{name.replace('_', '-')} {words}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field. Flags have no defaults, so that `config_of` knows which were given."""
    group = parser.add_argument_group("dynamic models", "Schemes that make layers uneven; all off by default.")
    for field in dataclasses.fields(DynamicsConfig):
        several = field.type == tuple[int, ...]
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int if several else field.type,
            nargs="+" if several else None,
            choices=field.metadata["choices"] or None,
            metavar="N" if several or field.type is int else None,
            help=field.metadata["help"],
        )


def config_of(args: argparse.Namespace) -> DynamicsConfig:
    """The config that parsed flags give. Raises ValueError, in one line, for a value out of range, schemes that exclude
    each other, and a flag whose scheme is off."""
    fields = {field.name: field for field in dataclasses.fields(DynamicsConfig)}
    given = {name: value for name in fields if (value := getattr(args, name, None)) is not None}
    try:
        config = DynamicsConfig(
            **{name: tuple(value) if type(value) is list else value for name, value in given.items()}
        )
    except SettingError as error:
        raise ValueError(f"{shown(error.name, error.value)} {error.why}") from None
    for name, value in given.items():
        needed = fields[name].metadata["needs"]
        if needed and getattr(config, needed) == fields[needed].default:
            raise ValueError(
                f"{shown(name, value)} does nothing without --{needed.replace('_', '-')}; add that, or drop it"
            )
    return config
