"""Experts that cannot be balanced or grouped as asked, found on the command line, with what would work instead.

Replicas are run by Megatron-LM's own modules and dispatchers. Options that replace these, or that move an expert's
gradient past the place where its replicas' gradients join it, would give wrong numbers or a hang; they are refused.
"""

import argparse
import dataclasses
import importlib.util

from balancing.experts.config import ExpertConfig
from megatron.balanced.contradictions import Contradiction, refuse

__all__ = ["check_experts"]

_CONTRADICTIONS: tuple[Contradiction, ...] = (
    ("spec", None, "puts another model in the place of the one that has replicas", "drop it"),
    (
        "transformer_impl",
        ("local", "transformer_engine"),
        "has experts of its own",
        "use --transformer-impl local, with --moe-grouped-gemm for grouped experts",
    ),
    ("use_te_activation_func", False, "is not known to experts that can have replicas", "drop it"),
    ("use_transformer_engine_op_fuser", False, "fuses experts that cannot have replicas", "drop it"),
    ("moe_mlp_glu_interleave_size", None, "orders weights in a way that replicas do not have", "drop it"),
    (
        "moe_pad_expert_input_to_capacity",
        False,
        "pads by logical experts, which replicas would see as tokens",
        "use --moe-expert-capacity-factor without it",
    ),
    ("moe_router_padding_for_quantization", False, "adds tokens that no replica is planned for", "drop it"),
    ("moe_router_padding_for_fp8", False, "adds tokens that no replica is planned for", "drop it"),
    ("moe_apply_probs_on_input", False, "is not done by experts with replicas", "drop it"),
    ("moe_latent_size", None, "needs Transformer Engine's experts, which cannot have replicas yet", "drop it"),
    ("moe_permute_fusion", False, "orders tokens in a way that replicas cannot undo", "drop it"),
    ("fp8", None, "needs Transformer Engine's experts, which cannot have replicas yet", "use --bf16"),
    ("fp4", None, "needs Transformer Engine's experts, which cannot have replicas yet", "use --bf16"),
    ("cuda_graph_impl", "none", "would replay the transfers of another plan", "use --cuda-graph-impl none"),
    ("enable_cuda_graph", False, "would replay the transfers of another plan", "drop it"),
    ("external_cuda_graph", False, "would replay the transfers of another plan", "drop it"),
    ("overlap_moe_expert_parallel_comm", False, "runs a layer in parts that replicas do not know", "drop it"),
    ("delay_wgrad_compute", False, "computes gradients after those of replicas were sent", "drop it"),
    ("overlap_dispatch_backward_with_experts_wgrad", False, "computes gradients after replicas were sent", "drop it"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "leaves weights unfinished that replicas are made of",
        "use --overlap-param-gather alone",
    ),
    ("fine_grained_activation_offloading", False, "is not done by experts with replicas", "drop it"),
    ("use_megatron_fsdp", False, "splits experts over ranks", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", False, "splits experts over ranks", "use --use-distributed-optimizer"),
)


def check_experts(args: argparse.Namespace, experts: ExpertConfig, *, device: str) -> tuple[ExpertConfig, list[str]]:
    """How experts will be balanced, and what the user should know of it, one line each.

    To be called before Megatron validates `args`. Where there is nothing to balance, balancing is switched off. Raises
    ValueError for what cannot be done.
    """
    _check_numbers(args)
    if (args.transformer_impl == "local" or experts.balance_experts) and args.num_experts and args.moe_grouped_gemm:
        _check_grouped(args)
    if not experts.balance_experts:
        return experts, []
    if why := _nothing_to_balance(args):
        return dataclasses.replace(experts, balance_experts=False), [f"--balance-experts has nothing to balance: {why}"]
    _check_contradictions(args, device)
    notes = []
    if args.mtp_num_layers and args.mtp_use_repeated_layer:
        notes.append("--balance-experts leaves out the experts of --mtp-use-repeated-layer, which run several times")
    if args.transformer_impl != "local":
        how = "torch's grouped GEMM" if args.moe_grouped_gemm else "Megatron-LM's own linear layers"
        notes.append(f"--balance-experts runs experts on {how} in the place of Transformer Engine's")
    return experts, notes


def _check_numbers(args: argparse.Namespace) -> None:
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    if ranks > 1 and not experts:
        raise ValueError(f"--expert-model-parallel-size {ranks} needs --num-experts, of which there are none")
    if experts and experts % ranks:
        raise ValueError(
            f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {ranks}; "
            f"use {-(-experts // ranks) * ranks} experts, or a size that divides {experts}"
        )


def _check_grouped(args: argparse.Namespace) -> None:
    """What our grouped GEMM experts, which stand in for Transformer Engine's, cannot do."""
    alone = "drop --moe-grouped-gemm"
    if args.add_bias_linear:
        raise ValueError(
            f"--moe-grouped-gemm on torch's grouped GEMM has no biases; add --disable-bias-linear or {alone}"
        )
    if args.moe_apply_probs_on_input:
        raise ValueError(
            f"--moe-apply-probs-on-input needs Transformer Engine's experts for --moe-grouped-gemm; {alone}"
        )
    if "moe_act" in (args.recompute_modules or []):
        raise ValueError(
            f"--recompute-modules moe_act needs Transformer Engine's experts; use --recompute-modules moe or {alone}"
        )
    unit = 8 if args.bf16 or args.fp16 else 4  # numbers in 16 bytes, which each row must be a multiple of
    tensor_ranks = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ffn = ("--moe-ffn-hidden-size", args.moe_ffn_hidden_size)
    if ffn[1] is None:
        ffn = ("--ffn-hidden-size", args.ffn_hidden_size)
    for (flag, size), ranks in ((("--hidden-size", args.hidden_size), 1), (ffn, tensor_ranks)):
        if size is not None and size % (unit * ranks):
            over = f" over {ranks} tensor-parallel ranks" if ranks > 1 else ""
            raise ValueError(
                f"--moe-grouped-gemm needs a multiple of {unit * ranks}, not {flag} {size}{over}; or {alone}"
            )


def _nothing_to_balance(args: argparse.Namespace) -> str | None:
    if not args.num_experts:
        return "the model has no experts (--num-experts)"
    if args.expert_model_parallel_size == 1:
        return "with --expert-model-parallel-size 1 every rank has all experts"
    return None


def _check_contradictions(args: argparse.Namespace, device: str) -> None:
    refuse(args, "--balance-experts", _CONTRADICTIONS)
    if args.moe_token_dispatcher_type == "flex":
        has_backend = args.moe_flex_dispatcher_backend == "deepep" and importlib.util.find_spec("deep_ep") is not None
        if device == "cpu" or not has_backend:
            raise ValueError(
                "--balance-experts with --moe-token-dispatcher-type flex needs DeepEP on GPUs "
                "(--moe-flex-dispatcher-backend deepep); use alltoall or allgather"
            )
