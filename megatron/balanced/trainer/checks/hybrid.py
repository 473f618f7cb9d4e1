"""Checks of the flags of a hybrid model (`--hybrid-layer-pattern`), which Megatron-LM fails at late or ignores."""

import argparse

from balancing.pipeline.pattern import KINDS, Pattern, read_pattern
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.shared.incompatible import HYBRID, HYBRID_SEGMENTS, check_compatible, shown
from megatron.balanced.trainer.dry_run import is_available
from megatron.balanced.trainer.sequence_rules import mamba_heads

__all__ = ["check_hybrid"]

# Flags of Mamba layers, and their defaults.
_MAMBA: dict[str, object] = {
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_num_heads": None,
    "mamba_training_ssm_states_dtype": None,
}
# --spec for the layers that Megatron-LM has without it, as its own scripts give it.
_SPECS = (
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
)
# Names of the pattern in older versions of Megatron-LM.
_OLD_NAMES = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
# Kinds of layers that cannot be trained yet, and why.
_NOT_YET = {
    "G": "its kernels need a GPU",
    "D": "it is untested",
}


def check_hybrid(args: argparse.Namespace) -> None:
    """Raise ValueError for a hybrid model that cannot be trained as the flags say.

    Called before Megatron validates `args`. Sets the arguments that Megatron derives from the pattern, since other
    checks read them.
    """
    for name in _OLD_NAMES:
        if (value := getattr(args, name)) is not None:
            raise ValueError(
                f"{shown(name, value)} has another name now; use --hybrid-layer-pattern, with the layers of "
                "multi-token prediction after a /"
            )
    text = args.hybrid_layer_pattern
    pattern = None if text is None else read_pattern(text)
    given = [shown(name, getattr(args, name)) for name, default in _MAMBA.items() if getattr(args, name) != default]
    given += ["--disable-mamba-mem-eff-path"] * (not args.use_mamba_mem_eff_path)
    if given and (pattern is None or not pattern.has("M")):
        raise ValueError(f"{given[0]} is for Mamba layers, M in --hybrid-layer-pattern, and there are none; drop it")
    if pattern is None:
        return
    if args.spec in _SPECS:
        args.spec = None
    check_compatible(args, HYBRID, f"--hybrid-layer-pattern {text}")
    for symbol, why in _NOT_YET.items():
        if pattern.has(symbol):
            raise ValueError(
                f"--hybrid-layer-pattern {text} has {symbol} ({KINDS[symbol]}), which cannot be trained yet: {why}; "
                "use other layers"
            )
    if pattern.depths:
        raise ValueError(
            f"--hybrid-layer-pattern {text} has multi-token prediction after /, which cannot be trained yet; leave "
            "it out"
        )
    _check_experts(args, text, pattern)
    if pattern.has("M"):
        _check_mamba(args, text)
    args.num_layers = len(pattern.symbols)
    args.multi_latent_attention = args.multi_latent_attention or pattern.has("+") or pattern.has("D")
    if pattern.has("*") and args.multi_latent_attention:
        raise ValueError(
            f"--multi-latent-attention is incompatible with --hybrid-layer-pattern {text}, whose attention (*) has no "
            "latents; use + instead of *, or drop --multi-latent-attention"
        )
    ends = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if len(pattern.segments) > 1:
        check_compatible(args, HYBRID_SEGMENTS, f"--hybrid-layer-pattern {text}")
    pattern.plan(args.pipeline_model_parallel_size, first=ends[0], last=ends[1])  # raises if layers do not divide


def _check_experts(args: argparse.Namespace, text: str, pattern: Pattern) -> None:
    if pattern.has("E") and not args.num_experts:
        raise ValueError(f"--hybrid-layer-pattern {text} has MoE layers (E) and no experts; give --num-experts")
    if args.num_experts and not pattern.has("E"):
        raise ValueError(
            f"--num-experts {args.num_experts} is for MoE layers, E in --hybrid-layer-pattern, and {text} has none; "
            "add some, or drop it"
        )


def _check_mamba(args: argparse.Namespace, text: str) -> None:
    """Check that mamba_ssm is installed, and the sizes that Megatron-LM asserts only while it builds Mamba layers."""
    if not is_cpu() and not is_available("mamba_ssm"):
        raise ValueError(
            f"--hybrid-layer-pattern {text} has M (Mamba), whose kernels are in mamba_ssm, which is not installed; "
            "install mamba-ssm and causal-conv1d"
        )
    if not args.use_mamba_mem_eff_path and (args.sft or args.dataloader_inter_document_masking):
        raise ValueError(
            "--disable-mamba-mem-eff-path is incompatible with packed documents: Mamba layers (M) would pass their "
            "state from a document to the next; drop it"
        )
    inner = 2 * (args.hidden_size or 0)
    if args.mamba_num_heads is None and inner % args.mamba_head_dim:
        raise ValueError(
            f"--mamba-head-dim {args.mamba_head_dim} does not divide {inner}, twice --hidden-size; use another size, "
            "or give --mamba-num-heads"
        )
    heads, groups, ranks = mamba_heads(args), args.mamba_num_groups, args.tensor_model_parallel_size
    for flag, number in (("--mamba-num-heads", heads), ("--mamba-num-groups", groups)):
        if number < 1 or number % ranks:
            raise ValueError(
                f"{flag} {number} is not divisible by --tensor-model-parallel-size {ranks}; use a multiple of it"
            )
    if heads % groups:
        raise ValueError(
            f"--mamba-num-groups {groups} does not divide the {heads} heads of Mamba layers; use a divisor of them"
        )
