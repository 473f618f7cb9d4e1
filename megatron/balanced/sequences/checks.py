"""Sequences that cannot be balanced as asked, found on the command line, with what would work instead.

Attention, its positions and the cutting of batches are ours then. Options that assume another layout of tokens, or
another attention, would give wrong numbers or a hang; they are refused.
"""

import argparse
import dataclasses

from balancing.sequences.config import SequenceConfig
from megatron.balanced.contradictions import Contradiction, refuse

__all__ = ["check_sequences", "why_of_one_size"]

_ATTENTION = "is an attention that cannot be spread over ranks yet"
_GRAPHS = "would replay the transfers of another plan"
_CONTRADICTIONS: tuple[Contradiction, ...] = (
    ("spec", (None,), "puts another model in the place of the one that follows plans", "drop it"),
    (
        "transformer_impl",
        ("local", "transformer_engine"),
        "has an attention of its own",
        "use --transformer-impl local",
    ),
    ("attention_dropout", (0,), "would drop other scores than a run on one rank", "use --attention-dropout 0"),
    ("multi_latent_attention", (False,), _ATTENTION, "drop it"),
    ("window_size", (None,), _ATTENTION, "drop it"),
    ("experimental_attention_variant", (None,), _ATTENTION, "drop it"),
    ("linear_attention_freq", (None,), _ATTENTION, "drop it"),
    ("softmax_type", ("vanilla",), _ATTENTION, "use --softmax-type vanilla"),
    ("qk_clip", (False,), "reads scores that no rank has as a whole", "drop it"),
    ("log_max_attention_logit", (False,), "reads scores that no rank has as a whole", "drop it"),
    (
        "position_embedding_type",
        ("learned_absolute", "rope", "yarn", "none"),
        "does not count positions from the beginning of a document",
        "use --position-embedding-type rope",
    ),
    ("reset_attention_mask", (False,), "is a dense mask", "use --dataloader-inter-document-masking instead"),
    ("mtp_num_layers", (None, 0), "shifts tokens once more after they were cut", "drop it"),
    ("hybrid_context_parallel", (False,), "cuts batches in its own way", "drop it, or use --sequence-planner hybrid"),
    ("dataloader_type", (None, "single", "cyclic"), "does not read Megatron-LM's datasets", "drop it"),
    ("cuda_graph_impl", ("none",), _GRAPHS, "use --cuda-graph-impl none"),
    ("enable_cuda_graph", (False,), _GRAPHS, "drop it"),
    ("external_cuda_graph", (False,), _GRAPHS, "drop it"),
    ("overlap_moe_expert_parallel_comm", (False,), "runs a layer in parts that plans do not know", "drop it"),
    ("fine_grained_activation_offloading", (False,), "is not done by attention over ranks", "drop it"),
    ("use_megatron_fsdp", (False,), "has not been tried with it", "use --use-distributed-optimizer"),
    ("use_torch_fsdp2", (False,), "has not been tried with it", "use --use-distributed-optimizer"),
)


def check_sequences(args: argparse.Namespace, sequences: SequenceConfig) -> tuple[SequenceConfig, list[str]]:
    """How sequences will be balanced, and what the user should know of it, one line each.

    To be called before Megatron validates `args`, which are set to what balancing needs. Where there is nothing to
    balance, balancing is switched off. Raises ValueError for what cannot be done.
    """
    if not sequences.balance_sequences:
        _check_left_alone(sequences)
        return sequences, []
    if args.context_parallel_size == 1:
        args.balance_sequences = False
        note = "--balance-sequences has nothing to balance: with --context-parallel-size 1 every rank has whole batches"
        return dataclasses.replace(sequences, balance_sequences=False), [note]
    refuse(args, "--balance-sequences", _CONTRADICTIONS)
    if args.num_experts and "sinkhorn" in args.moe_router_load_balancing_type:  # a name, or a list of them
        raise ValueError(
            "--balance-sequences contradicts --moe-router-load-balancing-type sinkhorn, which routes a token by the "
            "others on its rank; use aux_loss"
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
    args.create_attention_mask_in_dataloader = False
    return sequences, notes


def _check_left_alone(sequences: SequenceConfig) -> None:
    """Options of a balancer that is off would be taken for granted and do nothing."""
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
    """Why Megatron counts on all micro-batches having as many rows on each rank; None where it does not.

    Then padding that a data loader made stays in linear layers and is seen by routers, if not by attention.
    """
    if args.pipeline_model_parallel_size > 1:
        return "messages between pipeline stages have one size"
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":
        return "--moe-token-dispatcher-type allgather needs as many tokens on each rank; alltoall does not"
    for name in ("tp_comm_overlap", "fp8", "fp4"):
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')} counts on one size"
    return None
