"""What the flags of a run allow sequence balancing to do: whether micro-batches may differ in size, and whether losses
must tell samples apart.

Flags that are incompatible with it are refused by `megatron.balanced.trainer.checks.sequences`.
"""

import argparse

from balancing.sequences.config import SequenceConfig
from megatron.balanced.trainer.prediction import why_tail_needs_whole

__all__ = [
    "balancing_losses",
    "mamba_heads",
    "packs_samples_of_losses",
    "routes_by_sample",
    "why_not_shared",
    "why_of_one_size",
    "why_whole",
]


def why_whole(args: argparse.Namespace) -> str | None:
    """Why documents that were drawn for one micro-batch must run in one micro-batch; None if they need not."""
    flags = {name: f"--{name}-format {getattr(args, name, None)}" for name in ("fp8", "fp4")}
    for name in ("tp_comm_overlap", "fp8", "fp4", "overlap_moe_expert_parallel_comm"):
        if getattr(args, name, None):
            flag = flags.get(name, f"--{name.replace('_', '-')}")
            return f"{flag} needs the same number of rows in every micro-batch"
    if (why := why_tail_needs_whole(args)) is not None:
        return why
    if not args.num_experts:
        return None
    if (dispatcher := _dispatcher_of_equal_ranks(args)) is not None:
        return f"{dispatcher} needs the same number of rows in every micro-batch"
    for kind in ("aux_loss", "seq_aux_loss"):
        if kind in balancing_losses(args):
            return f"--moe-router-load-balancing-type {kind} needs the routing of all tokens of a micro-batch"
    if args.moe_z_loss_coeff:
        return "--moe-z-loss-coeff averages over micro-batches"
    return None


def why_of_one_size(args: argparse.Namespace) -> str | None:
    """Why every micro-batch must have the same number of rows on each rank; None if it need not.

    If it must, linear layers and routers process the padding of the data loader; attention does not.
    """
    if args.pipeline_model_parallel_size > 1:
        return "messages between pipeline stages have one size"
    if args.num_experts and (dispatcher := _dispatcher_of_equal_ranks(args)) is not None:
        return f"{dispatcher} needs the same number of tokens on each rank; alltoall does not"
    for name in ("tp_comm_overlap", "fp8", "fp4"):
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} needs micro-batches of one size"
    return None


def _dispatcher_of_equal_ranks(args: argparse.Namespace) -> str | None:
    """The flag of the dispatcher, if it needs as many tokens from each expert-parallel rank."""
    if args.moe_token_dispatcher_type == "allgather":
        return "--moe-token-dispatcher-type allgather"
    pads = getattr(args, "moe_hybridep_pad_uneven_dispatch_inputs", False)
    if args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == "hybridep" and not pads:
        return "--moe-flex-dispatcher-backend hybridep"
    return None


def balancing_losses(args: argparse.Namespace) -> list[str]:
    """The kinds of `--moe-router-load-balancing-type` that have a coefficient."""
    if not args.num_experts:
        return []
    kinds, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    return [kind for kind, coefficient in zip(kinds, coefficients, strict=False) if coefficient]


def packs_samples_of_losses(args: argparse.Namespace) -> bool:
    """Whether routers have a loss of each sample, and several samples are packed into one micro-batch."""
    packs = args.sft or args.dataloader_inter_document_masking
    return packs and (args.micro_batch_size or 1) > 1 and "seq_aux_loss" in balancing_losses(args)


def routes_by_sample(args: argparse.Namespace, sequences: SequenceConfig) -> bool:
    """Whether routers have a loss that must tell Megatron-LM's samples or micro-batches apart. sequences: the settings
    in force."""
    mixed = sequences.domain == "data" or (args.micro_batch_size or 1) > 1
    return sequences.enabled and mixed and bool({"aux_loss", "seq_aux_loss"} & {*balancing_losses(args)})


def mamba_heads(args: argparse.Namespace) -> int:
    """Heads of a Mamba layer."""
    return args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim


def why_not_shared(heads: int, groups: int, ranks: int) -> str | None:
    """Why `ranks` ranks cannot share the `heads` of a Mamba layer, in `groups` groups; None if they can.

    heads, groups: of one tensor-parallel rank.
    """
    if heads % ranks:
        return f"{ranks} ranks cannot share {heads} heads"
    if max(groups, ranks) % min(groups, ranks):
        return f"{ranks} ranks cannot share {groups} groups of heads"
    return None
