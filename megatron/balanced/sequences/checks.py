"""Checks of the flags of sequence balancing, at start-up.

The balancer replaces attention, its positions and the way batches are split over ranks. Flags that assume another
layout of tokens or another attention would give wrong numbers or a hang, so they are refused
(`megatron.balanced.checks.incompatible`).
"""

import argparse
import dataclasses

from balancing.sequences.config import SequenceConfig
from megatron.balanced.checks.incompatible import SEQUENCES, check_compatible

__all__ = ["check_sequences", "why_of_one_size"]


def check_sequences(args: argparse.Namespace, sequences: SequenceConfig) -> tuple[SequenceConfig, list[str]]:
    """Return the settings of sequence balancing in force, and notes for the user, one line each.

    Called before Megatron validates `args`, and sets those that balancing needs. Balancing is switched off where there
    is nothing to balance. Raises ValueError for flags that cannot work.
    """
    if not sequences.balance_sequences:
        _check_left_alone(sequences)
        return sequences, []
    if args.context_parallel_size == 1:
        args.balance_sequences = False
        note = "--balance-sequences has nothing to balance: with --context-parallel-size 1 every rank has whole batches"
        return dataclasses.replace(sequences, balance_sequences=False), [note]
    check_compatible(args, SEQUENCES, "--balance-sequences")
    if args.num_experts and "sinkhorn" in args.moe_router_load_balancing_type:  # a name, or a list of them
        raise ValueError(
            "--balance-sequences is incompatible with --moe-router-load-balancing-type sinkhorn: it routes a token by "
            "the others on its rank; use aux_loss"
        )
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    if backend not in ("auto", "flash"):
        raise ValueError(
            f"--balance-sequences is incompatible with --attention-backend {backend}: its attention is merged from "
            "pieces, which takes flash attention; use auto or flash"
        )
    window = getattr(args, "window_size", None)
    if window and window[1] not in (0, -1):
        raise ValueError(
            f"--balance-sequences is incompatible with --window-size {window[0]},{window[1]}: no token sees "
            f"those after it; use --window-size {window[0]},0"
        )
    _check_sizes(args, sequences)
    notes = []
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        notes.append("--balance-sequences sets --calculate-per-token-loss: each token of a global batch counts alike")
    if not args.sft and not args.dataloader_inter_document_masking:
        notes.append(
            "--balance-sequences takes each sample as one sequence; with --dataloader-inter-document-masking each "
            "document is one"
        )
    if args.sft and (why := why_of_one_size(args)):
        notes.append(f"--balance-sequences leaves the padding of conversations in linear layers, for {why}")
    if getattr(args, "multi_latent_attention", False) and args.apply_rope_fusion:
        args.apply_rope_fusion = False
        notes.append("--balance-sequences sets --no-rope-fusion: the fused kernel of latent attention knows one layout")
    args.create_attention_mask_in_dataloader = False
    return sequences, notes


def _check_left_alone(sequences: SequenceConfig) -> None:
    """Refuse settings of the balancer while it is off: the user would take them to be in force."""
    for field in dataclasses.fields(sequences):
        value = getattr(sequences, field.name)
        if value != field.default:
            raise ValueError(
                f"--{field.name.replace('_', '-')} {value} does nothing without --balance-sequences; add that, or drop "
                "it"
            )


def _check_sizes(args: argparse.Namespace, sequences: SequenceConfig) -> None:
    if not args.seq_length or not args.micro_batch_size:
        return  # which Megatron refuses
    ranks, tokens = args.context_parallel_size, args.seq_length * args.micro_batch_size
    parts = ranks * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    if args.seq_length % parts:
        raise ValueError(
            f"--balance-sequences needs a multiple of {parts} ranks that share a sequence, not --seq-length "
            f"{args.seq_length}; use {-(-args.seq_length // parts) * parts}"
        )
    capacity, mean = sequences.sequence_token_capacity, tokens // ranks
    if capacity and capacity < mean:
        raise ValueError(
            f"--sequence-token-capacity {capacity} is below the mean: --seq-length {args.seq_length} x "
            f"--micro-batch-size {args.micro_batch_size} on {ranks} ranks takes {mean}; use at least that"
        )
    if sequences.sequence_chunk > mean:
        raise ValueError(
            f"--sequence-chunk {sequences.sequence_chunk} is more than the {mean} tokens of a rank; use at most {mean}"
        )


def why_of_one_size(args: argparse.Namespace) -> str | None:
    """Why every micro-batch must have the same number of rows on each rank; None where it need not.

    Where it must, the padding of a data loader stays in linear layers, and routers see it; attention does not.
    """
    if args.pipeline_model_parallel_size > 1:
        return "messages between pipeline stages have one size"
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":
        return "--moe-token-dispatcher-type allgather needs as many tokens on each rank; alltoall does not"
    for name in ("tp_comm_overlap", "fp8", "fp4"):
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} counts on one size"
    return None
