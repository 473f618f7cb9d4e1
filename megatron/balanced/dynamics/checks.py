"""Checks of the flags of dynamic models, at start-up."""

import argparse

from balancing.dynamics.config import DynamicsConfig
from megatron.balanced.checks.incompatible import DYNAMICS, EXIT, FREEZE, PRUNE, SKIP, SPARSE, check_compatible

__all__ = ["check_dynamics"]


def check_dynamics(args: argparse.Namespace, config: DynamicsConfig) -> None:
    """Raise ValueError for schemes that cannot work. Called after Megatron has validated `args`."""
    if not config.enabled:
        return
    check_compatible(args, DYNAMICS, "a dynamic model")
    if config.freeze_layers:
        scheme = f"--freeze-layers {config.freeze_layers}"
        if config.freeze_layers >= args.num_layers:
            raise ValueError(
                f"{scheme} leaves none of --num-layers {args.num_layers} to train; freeze at most {args.num_layers - 1}"
            )
        if not args.untie_embeddings_and_output_weights:
            raise ValueError(
                f"{scheme} cannot freeze an embedding that the head trains as well; add "
                "--untie-embeddings-and-output-weights"
            )
        check_compatible(args, FREEZE, scheme)
    if config.prune_sparsity:
        scheme = f"dynamics.prune_sparsity {config.prune_sparsity}"
        check_compatible(args, PRUNE, scheme)
    if config.early_exit_layers:
        scheme, last = f"dynamics.early_exit_layers {list(config.early_exit_layers)}", config.early_exit_layers[-1]
        if last >= args.num_layers:
            raise ValueError(
                f"{scheme}: behind layer {last} of --num-layers {args.num_layers} nothing is left to skip; name layers "
                f"up to {args.num_layers - 1}"
            )
        check_compatible(args, EXIT, scheme)
        check_compatible(args, SKIP, scheme)
    if config.mixture_of_depths:
        scheme = f"dynamics.mixture_of_depths {config.mixture_of_depths}"
        if config.mixture_of_depths_every > args.num_layers:
            raise ValueError(
                f"dynamics.mixture_of_depths_every {config.mixture_of_depths_every} routes none of --num-layers "
                f"{args.num_layers}; use a number up to that"
            )
        check_compatible(args, SKIP, scheme)
    if config.sparse_attention != "none":
        check_compatible(args, SPARSE, f"dynamics.sparse_attention {config.sparse_attention}")
