"""Checks of a tokenized corpus: document lengths in its index, and token ids.

With a negative length Megatron-LM builds samples forever. A token id above the vocabulary fails in the embedding of
some later step. Up to `_LOOKED_AT` documents and tokens are all checked; of a larger corpus, as many in evenly spaced
blocks. Every rank reads at most 4 MB of tokens and 12 MB of the index.
"""

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.balanced.shared.errors import LocalError

__all__ = ["INDEX_HEAD", "INDEX_HEAD_BYTES", "check_lengths", "check_tokens", "check_vocabulary"]

# The head of an .idx file: a magic word, the format's version, the code of the token type, sequences, documents + 1.
INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_HEAD_BYTES = INDEX_HEAD.size  # followed by the lengths, int32 [sequence]

_BLOCKS, _BLOCK = 64, 16_384
_LOOKED_AT = _BLOCKS * _BLOCK
# Flags that find documents by the token at their end, not by the index.
_BY_TOKEN = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def _read(path: Path, kind: type, begin: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of the `count` numbers that begin at byte `begin` of a file: the index of the first number, the block."""
    starts = range(0, count, _BLOCK)
    if count > _LOOKED_AT:
        starts = np.linspace(0, count - _BLOCK, _BLOCKS).astype(np.int64).tolist()
    size = np.dtype(kind).itemsize
    for start in starts:
        yield start, np.fromfile(path, kind, min(_BLOCK, count - start), offset=begin + size * start)


def check_lengths(index: Path, lengths_at: int, sequences: int, token_bytes: int, corpus_bytes: int) -> None:
    """Raise LocalError for a sequence with a negative length, or one that is not completely in the corpus.

    index: the .idx file.
    lengths_at: offset in bytes of the lengths, int32 [sequence]. The offsets of sequences follow, int64 [sequence].
    token_bytes: the size of a token.
    corpus_bytes: the size of the .bin file.
    """
    lengths = _read(index, np.int32, lengths_at, sequences)
    begins = _read(index, np.int64, lengths_at + 4 * sequences, sequences)
    for (first, length), (_, begin) in zip(lengths, begins, strict=True):
        end = begin + length.astype(np.int64) * token_bytes
        wrong = (length < 0) | (begin < 0) | (end > corpus_bytes)
        if wrong.any():
            at = int(wrong.argmax())
            raise LocalError(
                f"{index} is damaged: document {first + at} has {length[at]} tokens from byte {begin[at]} of "
                f"{corpus_bytes}; write the pair again with scripts/prepare_data.py"
            )


def check_tokens(args: argparse.Namespace) -> list[str]:
    """Return notes on corpora without end-of-document tokens, if a flag looks for these.

    Called once the tokenizer exists. Raises LocalError for a token id outside the model's vocabulary.
    """
    from megatron.core.datasets.indexed_dataset import DType
    from megatron.training.global_vars import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data or args.sft:
        return []
    blend, per_split = get_blend_and_blend_per_split(args)
    paths = [path for part in (blend, *(per_split or ())) if part for path in part[0] if "://" not in path]
    by_token = [f"--{name.replace('_', '-')}" for name in _BY_TOKEN if getattr(args, name)]
    end = getattr(get_tokenizer(), "eod", None)
    notes = []
    for prefix in dict.fromkeys(paths):
        corpus = Path(f"{prefix}.bin")
        with open(f"{prefix}.idx", "rb") as file:
            kind = DType.dtype_from_code(INDEX_HEAD.unpack(file.read(INDEX_HEAD_BYTES))[2])
        has_end = False
        for first, tokens in _read(corpus, kind, 0, corpus.stat().st_size // np.dtype(kind).itemsize):
            wrong = (tokens < 0) | (tokens >= args.padded_vocab_size)
            if wrong.any():
                at = int(wrong.argmax())
                raise LocalError(
                    f"{corpus} has token {tokens[at]} at position {first + at + 1:,}, but the model's vocabulary has "
                    f"{args.padded_vocab_size}; train with the tokenizer and --vocab-size that it was written with"
                )
            has_end = has_end or bool((tokens == end).any())
        if by_token and not has_end:
            notes.append(
                f"{prefix} has no end-of-document token {end} in the parts that were checked, and {by_token[0]} needs "
                "it; write the corpus with --append-eod, or use --dataloader-inter-document-masking"
            )
    return notes


def check_vocabulary(args: argparse.Namespace) -> None:
    """Raise ValueError for a size of the vocabulary that is missing, or less than the tokenizer's. Called once the
    tokenizer exists."""
    from megatron.training.global_vars import get_tokenizer

    tokens = get_tokenizer().vocab_size
    if args.padded_vocab_size is None:
        raise ValueError(
            "--no-pad-vocab-size leaves the size of the vocabulary unset, and Megatron-LM needs it to count "
            f"operations; give --padded-vocab-size {tokens}, or drop it"
        )
    if args.padded_vocab_size < tokens:
        raise ValueError(
            f"--padded-vocab-size {args.padded_vocab_size} is below the {tokens} tokens of the tokenizer; use at least "
            "that many, or drop it"
        )
