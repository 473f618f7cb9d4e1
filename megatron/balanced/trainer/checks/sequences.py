"""Checks of the flags of sequence balancing, at start-up.

The balancer replaces attention, its positions and the way batches are split over ranks. Flags that assume another
layout of tokens or another attention would give wrong numbers or a hang, so they are refused
(`megatron.balanced.shared.incompatible`).
"""

import argparse
import dataclasses

from balancing.pipeline.pattern import read_pattern
from balancing.sequences.config import SequenceConfig
from balancing.sequences.planners.groups import number_of_groups
from megatron.balanced.shared.incompatible import (
    SEQUENCES,
    SEQUENCES_OF_DATA,
    SEQUENCES_OF_STEP,
    check_compatible,
    switch_off,
)
from megatron.balanced.trainer.checks.graphs import graph_modules
from megatron.balanced.trainer.sequence_rules import (
    balancing_losses,
    mamba_heads,
    why_not_shared,
    why_of_one_size,
    why_whole,
)

__all__ = ["check_data_domain", "check_sequences", "steps_ahead"]

_PREFETCHED = 2  # micro-batches that each worker of Megatron-LM's data loaders prefetches, PyTorch's default


def check_sequences(args: argparse.Namespace, sequences: SequenceConfig) -> tuple[SequenceConfig, list[str]]:
    """Return the settings of sequence balancing in force, and notes for the user, one line each.

    Called before Megatron validates `args`, and sets those that balancing needs. Balancing is switched off if there is
    nothing to balance. If only one domain is possible, it replaces the domain "auto"; otherwise
    `auto_domain.settle_domain` decides later. Raises ValueError for incompatible flags.
    """
    if not sequences.enabled:
        return sequences, []
    if args.hybrid_layer_pattern and not read_pattern(args.hybrid_layer_pattern).attention:
        args.balance_sequences = args.sequence_micro_batches = False
        pattern = f"--hybrid-layer-pattern {args.hybrid_layer_pattern}"
        idle = f"{pattern} has no attention, and in other layers all tokens cost the same"
        off = dataclasses.replace(sequences, enabled=False, domain="auto", micro_batches=False)
        return off, [f"--balance-sequences has nothing to balance: {idle}"]
    notes = []
    if sequences.micro_batches and (idle := _why_not_dealt(args)):
        args.sequence_micro_batches = False
        sequences = dataclasses.replace(sequences, micro_batches=False)
        notes.append(f"--sequence-micro-batches has nothing to balance: {idle}")
    if not sequences.micro_batches and (idle := _why_idle(args, sequences.domain)):
        args.balance_sequences = False
        off = dataclasses.replace(sequences, enabled=False, domain="auto")
        return off, [*notes, f"--balance-sequences has nothing to balance: {idle}"]
    check_compatible(args, SEQUENCES, "--balance-sequences", _states(args, args.context_parallel_size))
    if sequences.domain == "auto" and (args.context_parallel_size == 1 or _data_parallel_size(args) == 1):
        domain = "data" if args.context_parallel_size == 1 else "context"
        sequences = dataclasses.replace(sequences, domain=domain)
    if sequences.domain == "data":
        check_data_domain(args)
    if sequences.micro_batches:
        notes += _check_dealt(args)
    window = getattr(args, "window_size", None)
    if window and window[1] not in (0, -1):
        raise ValueError(
            f"--balance-sequences is incompatible with --window-size {window[0]},{window[1]}: no token sees "
            f"those after it; use --window-size {window[0]},0"
        )
    sequences = _with_kernel(args, sequences)
    _check_sizes(args, sequences)
    if not args.sft and not args.dataloader_inter_document_masking:
        notes.append(
            "--balance-sequences takes each sample as one sequence; with --dataloader-inter-document-masking each "
            "document is one"
        )
    if args.sft and not sequences.micro_batches and (why := why_of_one_size(args)):
        notes.append(f"--balance-sequences leaves the padding of conversations in linear layers, since {why}")
    if getattr(args, "multi_latent_attention", False) and args.apply_rope_fusion:
        args.apply_rope_fusion = False
        notes.append(
            "--balance-sequences sets --no-rope-fusion: the fused kernel of latent attention supports one layout only"
        )
    from megatron.balanced.sequences.shape import latent_shape

    if latent_shape(args) is not None:
        notes.append("--balance-sequences sends latents instead of keys and values")
    args.create_attention_mask_in_dataloader = False
    notes += switch_off(args, SEQUENCES, "--balance-sequences")
    if args.cuda_graph_impl == "none":
        setattr(args, graph_modules(args)[0], [])  # Megatron-LM's schedules read it also without graphs
    return sequences, notes


def _data_parallel_size(args: argparse.Namespace) -> int:
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return max(args.world_size // model, 1)


def _why_idle(args: argparse.Namespace, domain: str) -> str | None:
    """Why no rank can have more work than another of its domain; None if one can."""
    if args.context_parallel_size > 1:
        return None
    if domain == "context":
        return "with --context-parallel-size 1 every rank has whole batches; use --sequence-domain data"
    if _data_parallel_size(args) == 1:
        return "with --context-parallel-size 1 and one data-parallel rank every rank has whole batches"
    if not args.sft and not args.dataloader_inter_document_masking:
        return (
            "with --context-parallel-size 1 every rank has whole samples, which are of one length without "
            "--dataloader-inter-document-masking"
        )
    return None


def _why_not_dealt(args: argparse.Namespace) -> str | None:
    """Why no pipeline stage can wait for a micro-batch that costs more than another; None if one can."""
    if args.pipeline_model_parallel_size == 1:
        return "without a pipeline no stage waits for a micro-batch"
    if _micro_batches(args) < 2:
        return "a step has one micro-batch"
    if not args.sft and not args.dataloader_inter_document_masking:
        return "samples are of one length without --dataloader-inter-document-masking"
    return None


def _check_dealt(args: argparse.Namespace) -> list[str]:
    """Raise ValueError for flags that depend on the order of micro-batches or change the size of steps.

    Returns notes if whole micro-batches are distributed, not documents, and if steps wait for the data loaders.
    """
    refused: list[tuple[str, str, str]] = []
    if "global_aux_loss" in balancing_losses(args):
        why = "it counts the tokens of the micro-batches before, whose order changes"
        refused.append(("--moe-router-load-balancing-type global_aux_loss", why, "use aux_loss"))
    whole = why_whole(args)
    if whole and args.sft:
        why = f"lengths of its samples are known from their tokens only, and documents stay together, since {whole}"
        refused.append(("--sft", why, "drop one of the two"))
    check_compatible(args, SEQUENCES_OF_STEP, "--sequence-micro-batches", refused)
    if whole:
        return [
            f"--sequence-micro-batches reorders whole micro-batches and leaves their documents together, since {whole}"
        ]
    number, ready = _micro_batches(args), _PREFETCHED * args.num_workers
    if ready >= number:
        return []
    return [
        f"--sequence-micro-batches reads all {number} micro-batches of a step before it begins, and data loaders hold "
        f"{ready} of them ready; with --num-workers {-(-number // _PREFETCHED)} the device does not wait for the others"
    ]


def steps_ahead(args: argparse.Namespace) -> int:
    """Steps whose micro-batches data loaders may have begun to read when a step ends."""
    return -(-_PREFETCHED * args.num_workers // _micro_batches(args))


def _micro_batches(args: argparse.Namespace) -> int:
    """Micro-batches of a step on each data-parallel rank."""
    size = (args.micro_batch_size or 1) * _data_parallel_size(args)
    return (args.global_batch_size or size) // size


def check_data_domain(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that depend on the tokens of one data-parallel rank, or on the order of its
    samples."""
    given = "--balance-sequences with --sequence-domain data"
    data = _data_parallel_size(args)
    ranks = args.context_parallel_size * data // number_of_groups(data)
    check_compatible(args, SEQUENCES_OF_DATA, given, _states(args, ranks))


def _states(args: argparse.Namespace, ranks: int) -> list[tuple[str, str, str]]:
    """The pattern, if it has Mamba layers whose heads `ranks` ranks cannot share: flag, reason, way out."""
    if not args.hybrid_layer_pattern:
        return []
    layers = read_pattern(args.hybrid_layer_pattern).symbols.count("M")
    heads, groups = (number // args.tensor_model_parallel_size for number in (mamba_heads(args), args.mamba_num_groups))
    why = why_not_shared(heads, groups, ranks) if layers else None  # `check_hybrid` has checked these sizes
    if why is None:
        return []
    flag = f"--hybrid-layer-pattern {args.hybrid_layer_pattern}"
    instead = "share micro-batches among fewer ranks, by --sequence-domain context or a smaller --context-parallel-size"
    return [(flag, f"its {layers} Mamba layers (M) take documents whole, and {why}", instead)]


def _with_kernel(args: argparse.Namespace, sequences: SequenceConfig) -> SequenceConfig:
    """The settings with the kernels that `--attention-backend` asks for. Raises ValueError if they name others."""
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    if backend == "auto" or sequences.kernel == backend:
        return sequences
    if sequences.kernel == "auto":
        return dataclasses.replace(sequences, kernel=backend)
    if (backend == "fused") != (sequences.kernel in ("fused", "cudnn")):
        raise ValueError(
            f"sequences.kernel {sequences.kernel} contradicts --attention-backend {backend}; drop one of the two"
        )
    return sequences


def _check_sizes(args: argparse.Namespace, sequences: SequenceConfig) -> None:
    if not args.seq_length or not args.micro_batch_size:
        return  # Megatron-LM refuses that
    ranks, tokens = args.context_parallel_size, args.seq_length * args.micro_batch_size
    parts = ranks * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    if args.seq_length % parts:
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of the {parts} ranks that share a sequence with "
            f"--balance-sequences; use {-(-args.seq_length // parts) * parts}"
        )
    capacity, mean = sequences.token_capacity, tokens // ranks
    if capacity and capacity < mean:
        raise ValueError(
            f"sequences.token_capacity {capacity} is below the mean: --seq-length {args.seq_length} x "
            f"--micro-batch-size {args.micro_batch_size} on {ranks} ranks takes {mean}; use at least that"
        )
    if sequences.chunk > mean:
        raise ValueError(
            f"sequences.chunk {sequences.chunk} is more than the {mean} tokens of a rank; use at most {mean}"
        )
