"""`--sequence-domain auto`: the ranks that share micro-batches, chosen by the cost model at start-up.

Document lengths are read from a few blocks of the training set's index. All ranks read the same blocks, so all choose
the same domain without communication, where the same kernels are installed on all; `agreement` compares it.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from balancing.sequences.domain_choice import DrawnSteps, choose_domain
from megatron.balanced.shared.incompatible import IncompatibleError
from megatron.balanced.trainer.checks.data import INDEX_HEAD_BYTES
from megatron.balanced.trainer.checks.sequences import check_data_domain
from megatron.balanced.trainer.config import BalanceConfig, cluster_from_flags

__all__ = ["sample_lengths", "settle_domain"]

_SAMPLES = 256  # drawn from the training set
_BLOCKS, _BLOCK = 16, 4096  # blocks read from an index, and document lengths per block


def settle_domain(args: argparse.Namespace, config: BalanceConfig) -> tuple[BalanceConfig, list[str]]:
    """Return the config with the domain "auto" settled, and notes for the user, one line each.

    args: validated by Megatron-LM, so that they describe the model.
    """
    if config.sequences.domain != "auto" or not config.sequences.enabled:
        return config, []
    domain, note = _settled(args, config)
    sequences = dataclasses.replace(config.sequences, domain=domain)
    return dataclasses.replace(config, sequences=sequences), [f"--sequence-domain auto is {domain}: {note}"]


def _settled(args: argparse.Namespace, config: BalanceConfig) -> tuple[str, str]:
    """The chosen domain and the reason."""
    try:
        check_data_domain(args)
    except IncompatibleError as error:
        return "context", f"data is incompatible with {next(iter(error.why))}"
    if not args.dataloader_inter_document_masking and not args.sft:
        return "context", "without --dataloader-inter-document-masking all samples cost the same"
    samples = sample_lengths(args)
    if samples is None:
        return "context", "the lengths of documents are not known before training"
    from megatron.training.argument_utils import core_transformer_config_from_args

    from megatron.balanced.sequences.shape import attention_shape
    from megatron.balanced.shared.process_groups import cluster_of
    from megatron.balanced.trainer.dry_run import assumes_gpus, groups_along
    from megatron.balanced.trainer.kernels import with_planned_kernel

    machine = cluster_from_flags(config, args.world_size)
    context, data = (
        with_planned_kernel(
            cluster_of(groups_along(args, axes)[0], machine), config.sequences, assumes_gpus=assumes_gpus()
        )
        for axes in ("cp", "dp-cp")
    )
    expert_ranks = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1) if args.num_experts else 1
    steps = DrawnSteps(
        samples,
        args.micro_batch_size,
        micro_batches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        waiting=max(1, expert_ranks // (args.tensor_model_parallel_size * args.context_parallel_size)),
    )
    shape = attention_shape(core_transformer_config_from_args(args), args.hybrid_layer_pattern)
    found = choose_domain(steps, context, data, shape=shape, method=config.sequences.planner)
    ratio = found.data_seconds / found.context_seconds
    return found.domain, f"the cost model predicts steps {ratio:.2f} times as long with data as with context"


def sample_lengths(args: argparse.Namespace) -> list[tuple[int, ...]] | None:
    """[sample] -> tokens of its documents, for 256 samples drawn with a fixed seed; None without a readable index."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    blend = blend or (per_split and per_split[0])
    if args.sft or args.mock_data or args.fim_data or not blend:
        return None
    paths, weights = blend
    known = [_lengths_of_index(path) for path in paths]
    if any(lengths is None or not lengths.sum() for lengths in known):
        return None
    generator = np.random.default_rng(0)
    shares = None if weights is None else np.array(weights, dtype=float) / sum(weights)
    chosen = generator.choice(len(paths), _SAMPLES, p=shares)
    return [_fill(known[number], args.seq_length, generator) for number in chosen]


def _lengths_of_index(prefix: str) -> np.ndarray | None:
    """int32 [document], tokens of documents in evenly spaced blocks of an index; None if it cannot be read."""
    path = Path(f"{prefix}.idx")
    if "://" in prefix or not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(INDEX_HEAD_BYTES - 16)
        documents = int(np.fromfile(file, np.uint64, 1)[0])
        blocks = []
        for begin in np.unique(np.linspace(0, max(documents - _BLOCK, 0), _BLOCKS).astype(np.int64)).tolist():
            file.seek(INDEX_HEAD_BYTES + 4 * begin)
            blocks.append(np.fromfile(file, np.int32, min(_BLOCK, documents - begin)))
    return np.concatenate(blocks)


def _fill(lengths: np.ndarray, tokens: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Draw the document lengths of one sample of `tokens` tokens from `lengths`; the first and the last are cut.

    The sample begins at a random token of the corpus, as Megatron-LM's samples do.
    """
    token = int(generator.integers(int(lengths.sum(dtype=np.int64))))
    ends = lengths.cumsum(dtype=np.int64)
    first = int(np.searchsorted(ends, token, side="right"))
    documents, missing = [], tokens
    length = int(ends[first]) - token
    while missing > 0:
        if length:
            documents.append(min(length, missing))
            missing -= documents[-1]
        length = int(lengths[generator.integers(len(lengths))])
    return tuple(documents)
