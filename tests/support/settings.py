"""Settings that several tests have, as a command line names them."""

import re

from benchmarks.settings import scheme_flags, settings

__all__ = ["EARLY_EXIT", "HASH_ATTENTION", "PLASTICITY", "scheme_flags", "settings", "without_settings"]

# Small enough for a model of four layers.
PLASTICITY = scheme_flags(freeze_layers_policy="plasticity", freeze_layers_patience=1, freeze_layers_tolerance=1)
HASH_ATTENTION = scheme_flags(sparse_attention="hash", sparse_attention_block=8, sparse_attention_keep=2)
EARLY_EXIT = scheme_flags(
    early_exit_layers=[1, 2, 3], early_exit_threshold=0.9, early_exit_start=1, early_exit_loss_weight=0.5
)


def without_settings(flags: str) -> str:
    """`flags` without their files of settings, for a run without the balancer that these are for."""
    return re.sub(r"--balance-config \S+", "", flags)
