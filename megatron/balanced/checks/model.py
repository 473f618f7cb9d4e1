"""Checks of flags of the model that Megatron-LM would ignore, or would refuse late and without their names."""

import argparse

from balancing.doctor.installed import find_apex
from megatron.balanced.checks.incompatible import shown

__all__ = ["check_model"]

# Flags of the hybrid model, which only another entry point of Megatron-LM builds, and their defaults.
_HYBRID: dict[str, object] = {
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "mtp_hybrid_override_pattern": None,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
    "mamba_training_ssm_states_dtype": None,
}


def check_model(args: argparse.Namespace) -> None:
    """Raise ValueError for a model that cannot be trained as the flags say. Called before Megatron validates `args`."""
    _check_hybrid(args)
    if args.lazy_mpu_init:
        raise ValueError("--lazy-mpu-init leaves process groups to a program around Megatron-LM; drop it")
    if args.rotary_base is not None and args.rotary_base <= 0:
        raise ValueError(f"--rotary-base {args.rotary_base} must be above 0, such as 10000")
    for one, other in (("quick_geglu", "swiglu"), ("squared_relu", "swiglu"), ("squared_relu", "quick_geglu")):
        if getattr(args, one) and getattr(args, other):
            raise ValueError(
                f"{shown(one, True)} is incompatible with {shown(other, True)}: a model has one activation; "
                "drop one of them"
            )
    if args.experimental_attention_variant is not None and args.transformer_impl != "transformer_engine":
        raise ValueError(
            f"{shown('experimental_attention_variant', args.experimental_attention_variant)} needs Transformer Engine, "
            "which is not installed or not selected; drop it"
        )
    if not args.train_iters and not args.train_samples and not args.skip_train:
        raise ValueError("nothing says how long to train; give --train-iters or --train-samples")
    if args.layernorm_zero_centered_gamma and args.transformer_impl == "local" and find_apex()["state"] != "ok":
        raise ValueError(
            "--apply-layernorm-1p needs Transformer Engine's or Apex's norm, which is not installed or not selected; "
            "drop it"
        )
    if args.train_iters and not args.eval_interval and not args.full_validation and not args.skip_train:
        raise ValueError(
            f"--train-iters {args.train_iters} needs an interval of validation, and --eval-interval is not given; add "
            "--eval-interval 1000, with --eval-iters 0 to leave validation out"
        )
    if args.overlap_moe_expert_parallel_comm:
        _check_batch_overlap(args)
    graphs = args.cuda_graph_impl == "transformer_engine" or args.external_cuda_graph
    if graphs and args.transformer_impl == "local" and args.pipeline_model_parallel_size > 1:
        # Stages without data have no mask, for which Megatron-LM replays attention with an empty one.
        raise ValueError(
            "--cuda-graph-impl transformer_engine is incompatible with --transformer-impl local in a pipeline: "
            "attention would see the tokens to come; use --transformer-impl transformer_engine, or drop it"
        )


def _check_hybrid(args: argparse.Namespace) -> None:
    for name, default in _HYBRID.items():
        value = getattr(args, name)
        if value != default:
            raise ValueError(
                f"{shown(name, value)} describes a hybrid model, which cannot be trained yet; drop it, and describe a "
                "GPT model with --num-layers"
            )
    if not args.use_mamba_mem_eff_path:
        raise ValueError("--disable-mamba-mem-eff-path is for a hybrid model, which cannot be trained yet; drop it")


def _check_batch_overlap(args: argparse.Namespace) -> None:
    flag = "--overlap-moe-expert-parallel-comm"
    if args.expert_model_parallel_size == 1:
        raise ValueError(
            f"{flag} hides messages between expert-parallel ranks, and --expert-model-parallel-size 1 has none; use a "
            "larger size, or drop it"
        )
    if args.moe_token_dispatcher_type not in ("alltoall", "flex"):
        raise ValueError(
            f"{flag} is incompatible with --moe-token-dispatcher-type {args.moe_token_dispatcher_type}: it overlaps "
            "all-to-all messages; use alltoall, or drop it"
        )
