"""Multi-token prediction (`--mtp-num-layers`) in a run of `pretrain_gpt.py`: the stages that need data or embeddings
for it, the modules in its layers, and what it does not work with.

Balancers know it as the tail of a model (`megatron.balanced.shared.tail`). Checks ask here before `megatron.core` is
imported.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

__all__ = [
    "check_packed_tail",
    "get_embedding_ranks",
    "has_tail",
    "note_on_experts",
    "tail_on_stage",
    "tied_in_pipeline",
    "why_tail_needs_whole",
    "with_the_models_modules",
    "without_repeated",
]


def has_tail(args: argparse.Namespace) -> bool:
    """Whether the model has layers of multi-token prediction."""
    return bool(args.mtp_num_layers)


def tail_on_stage(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Whether this rank has them, in its model chunk `vp_stage`."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    if not has_tail(args):
        return False
    layout = args.pipeline_model_parallel_layout
    layout = _parsed(layout, args.pipeline_model_parallel_size) if isinstance(layout, str) else layout
    return mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


@functools.cache
def _parsed(layout: str, stages: int) -> Any:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout.from_str(layout, stages)


def get_embedding_ranks(args: argparse.Namespace, config: Any) -> Callable[[list[int]], list[int]] | None:
    """For `pretrain`: from the ranks of a pipeline to those that hold the embedding. These are the first one, those of
    multi-token prediction, and the last one if the head shares its weights. None for Megatron-LM's own choice.

    config: the config of the model.
    """
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    def ranks(pipeline: list[int]) -> list[int]:
        held = {pipeline[0], *get_mtp_ranks(pipeline, config)}
        return sorted(held if args.untie_embeddings_and_output_weights else held | {pipeline[-1]})

    return ranks if has_tail(args) else None


def with_the_models_modules(original: Callable) -> Callable:
    """Replaces `mtp_block_spec`. The original builds layers of multi-token prediction from Megatron-LM's own layer
    spec, whatever spec the model has. The replacement fills in the modules of `LayerSpecs`."""

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        spec = original(config, transformer_layer_spec, vp_stage=vp_stage)
        for layer in spec.layer_specs if spec is not None else ():
            config.transformer_layer_spec.fill_in_tail(layer)
        return spec

    return mtp_block_spec


def without_repeated(args: argparse.Namespace, replicated: dict[Any, Any]) -> dict[Any, Any]:
    """`replicated`, modules for experts with replicas, as far as the layers have these: one that runs several times
    has none."""
    return {} if args.mtp_use_repeated_layer else replicated


def note_on_experts(args: argparse.Namespace) -> list[str]:
    """What --balance-experts leaves out, one line each."""
    if not (args.mtp_num_layers and args.mtp_use_repeated_layer):
        return []
    return ["--balance-experts leaves out the experts of --mtp-use-repeated-layer, which run several times"]


def why_tail_needs_whole(args: argparse.Namespace) -> str | None:
    """Why micro-batches must have as many rows as drawn, as `why_whole` says; None if they need not."""
    layout = getattr(args.pipeline_model_parallel_layout, "input_data", args.pipeline_model_parallel_layout)
    if not has_tail(args) or not isinstance(layout, str) or "m" in layout.split("|")[-1]:
        return None
    return (
        f"--mtp-num-layers {args.mtp_num_layers} before the last stage has messages with more rows than those of "
        "other stages"
    )


def tied_in_pipeline(args: argparse.Namespace) -> str | None:
    """The flag if the last of several stages has an embedding for prediction that shares weights with the head; None
    otherwise. Megatron-LM cannot save such a model in its own format."""
    last = str(args.pipeline_model_parallel_layout or "m").split("|")[-1]
    tied = has_tail(args) and not args.untie_embeddings_and_output_weights
    if not tied or args.pipeline_model_parallel_size == 1 or "m" not in last:
        return None
    return f"--mtp-num-layers {args.mtp_num_layers}"


def check_packed_tail(args: argparse.Namespace, packs: str) -> None:
    """Raise ValueError where Megatron-LM fails late on packed documents. packs: the flag that packs them."""
    if has_tail(args) and args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            f"--mtp-num-layers {args.mtp_num_layers} with {packs} is incompatible with "
            "--overlap-moe-expert-parallel-comm, whose layers of prediction take no packed documents; "
            "drop one of the two"
        )
