"""Flags of the model and its training that Megatron-LM would ignore, or would refuse late and in other words."""

import argparse

from megatron.balanced.contradictions import shown

__all__ = ["check_model"]

# Flags of the hybrid model, which only another entry of Megatron-LM builds, and what they are when they are not given.
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
    """To be called before Megatron validates `args`. Raises ValueError for what would not train as asked."""
    _check_hybrid(args)
    for one, other in (("quick_geglu", "swiglu"), ("squared_relu", "swiglu"), ("squared_relu", "quick_geglu")):
        if getattr(args, one) and getattr(args, other):
            raise ValueError(f"{shown(one, True)} contradicts {shown(other, True)}; drop one of them")
    if args.experimental_attention_variant is not None and args.transformer_impl != "transformer_engine":
        raise ValueError(
            f"{shown('experimental_attention_variant', args.experimental_attention_variant)} needs Transformer Engine, "
            "which is not installed or not selected; drop it"
        )
    if args.train_iters and not args.eval_interval and not args.full_validation and not args.skip_train:
        raise ValueError(
            f"--train-iters {args.train_iters} needs to know when to validate, but there is no --eval-interval; add "
            "--eval-interval 1000, with --eval-iters 0 to leave validation out"
        )
    if args.overlap_moe_expert_parallel_comm:
        _check_batch_overlap(args)


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
            f"{flag} contradicts --moe-token-dispatcher-type {args.moe_token_dispatcher_type}; use alltoall, or drop it"
        )
    if not (args.bf16 or args.fp16):
        raise ValueError(f"{flag} works in half precision only; add --bf16 or --fp16, or drop it")
