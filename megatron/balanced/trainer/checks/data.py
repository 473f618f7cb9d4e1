"""Checks of the data, before anything is built: files, the split, document lengths in the index, and token ids.

Megatron-LM finds most of these faults minutes later and on one rank only, as an assertion in a data loader. With a
negative length it builds samples forever. A token id above the vocabulary fails in the embedding of some later step. Up
to `_LOOKED_AT` documents and tokens are all checked; of a larger corpus, as many in evenly spaced blocks. Every rank
reads at most 4 MB of tokens and 12 MB of the index.
"""

import argparse
import importlib.util
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron.balanced.shared.errors import LocalError

__all__ = ["INDEX_HEAD_BYTES", "check_data", "check_tokens", "check_vocabulary"]

# The head of an .idx file: a magic word, the format's version, the code of the token type, sequences, documents + 1.
_INDEX_HEAD = struct.Struct("<9sQBQQ")
INDEX_HEAD_BYTES = _INDEX_HEAD.size  # followed by the lengths, int32 [sequence]

_BLOCKS, _BLOCK = 64, 16_384
_LOOKED_AT = _BLOCKS * _BLOCK
# Flags that find documents by the token at their end, not by the index.
_BY_TOKEN = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
_MAGIC = b"MMIDIDX\x00\x00"
_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's


def check_data(args: argparse.Namespace) -> None:
    """Raise ValueError for data that is missing, truncated, empty, or empty after the split.

    Called before Megatron validates `args`.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.dataloader_type == "external":
        raise ValueError(
            "--dataloader-type external is for a program that brings its own data loaders; use single or cyclic"
        )
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [part for part in (blend, *(per_split or ())) if part]
    if args.mock_data and blends:
        raise ValueError(
            f"--mock-data is incompatible with the data path {blends[0][0][0]}: it replaces real data; drop one of them"
        )
    if not args.mock_data and not blends:
        raise ValueError("there is no data to train on: give --data-path PREFIX, or --mock-data to try without")
    if args.sft:
        missing = [name for name in ("datasets", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--sft needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    shares = _check_split(args, args.split or _DEFAULT_SPLIT) if blend else None
    for paths, _ in blends:
        for path in paths:
            if "://" in path:  # an object store, which Megatron reads itself
                continue
            if args.sft:
                _check_file(Path(path), "one conversation a line, as JSON")
            else:
                sequences = _check_indexed(path)
                if shares:
                    _check_shares(path, sequences, shares, args.split or _DEFAULT_SPLIT)


def _check_split(args: argparse.Namespace, split: str) -> list[tuple[float, float] | None]:
    """Begin and end of the train, validation and test set as fractions of the documents; None for an empty set."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    numbers = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not 1 <= len(numbers) <= 3 or sum(numbers) == 0:
        raise ValueError(f"--split {split} is not the weights of train, validation and test set; try --split 98,2,0")
    train, validation, test = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    if train is None and not args.skip_train:
        raise ValueError(f"--split {split} leaves nothing to train on; give the first number a weight")
    if validation is None and args.eval_iters and not args.full_validation:
        raise ValueError(
            f"--split {split} has no validation set, and --eval-iters {args.eval_iters} validates; use --eval-iters 0 "
            "or give the second number a weight"
        )
    return [train, validation, test]


def _check_shares(prefix: str, documents: int, shares: list[tuple[float, float] | None], split: str) -> None:
    """Refuse a set that rounds to no documents: Megatron would look for samples in it forever."""
    for name, share in zip(("training", "validation", "test"), shares, strict=True):
        if share and round(share[0] * documents) == round(share[1] * documents):
            raise LocalError(
                f"{prefix} has {documents} document(s), and --split {split} leaves its {name} set without any; give it "
                f"a larger weight or none in --split, or train on more documents"
            )


def _check_file(path: Path, content: str) -> int:
    """Return the size in bytes. Raises LocalError for a missing or an empty file."""
    if not path.is_file():
        hint = "; --data-path takes the name without .bin or .idx" if path.stem.endswith((".bin", ".idx")) else ""
        raise LocalError(f"{path} does not exist: it should hold {content}{hint}")
    size = path.stat().st_size
    if size == 0:
        raise LocalError(f"{path} is empty: it should hold {content}")
    return size


def _check_indexed(prefix: str) -> int:
    """Check that a pair of .bin and .idx is complete and belongs together.

    Returns the number of sequences, which `--split` divides as documents.
    """
    from megatron.core.datasets.indexed_dataset import DType

    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    again = "write the pair again with scripts/prepare_data.py"
    index_size = _check_file(index, "the index of a tokenized corpus (scripts/prepare_data.py writes it)")
    with index.open("rb") as file:
        head = file.read(_INDEX_HEAD.size)
        if not head.startswith(_MAGIC[: len(head)]):
            raise LocalError(f"{index} is not an index of tokenized data; {again}")
        if len(head) < _INDEX_HEAD.size:
            raise LocalError(f"{index} is truncated: it has {index_size} bytes; {again}")
        _, version, code, sequences, documents = _INDEX_HEAD.unpack(head)
        if version != 1 or code not in {kind.value for kind in DType}:
            raise LocalError(f"{index} has format version {version} and token type {code}, which are unknown; {again}")
        lengths_end = _INDEX_HEAD.size + 4 * sequences
        pointers_end = lengths_end + 8 * sequences
        needed = pointers_end + 8 * documents
        if index_size < needed:
            raise LocalError(f"{index} is truncated: it has {index_size} bytes of {needed}; {again}")
        if sequences == 0:
            raise LocalError(f"{prefix} is an empty corpus: its index counts no documents; train on another")
        file.seek(lengths_end - 4)
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(pointers_end - 8)
        (last_start,) = struct.unpack("<q", file.read(8))
    needed = last_start + last_length * DType.size(code)
    if needed == 0:
        raise LocalError(f"{prefix} is an empty corpus: its {sequences} documents have no tokens; train on another")
    size = _check_file(tokens, "the tokens of a corpus (scripts/prepare_data.py writes them)")
    if size < needed:
        raise LocalError(f"{tokens} is truncated or belongs to another index: it has {size} bytes of {needed}; {again}")
    _check_lengths(index, _INDEX_HEAD.size, sequences, DType.size(code), size)
    return sequences


def _read(path: Path, kind: type, begin: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of the `count` numbers that begin at byte `begin` of a file: the index of the first number, the block."""
    starts = range(0, count, _BLOCK)
    if count > _LOOKED_AT:
        starts = np.linspace(0, count - _BLOCK, _BLOCKS).astype(np.int64).tolist()
    size = np.dtype(kind).itemsize
    for start in starts:
        yield start, np.fromfile(path, kind, min(_BLOCK, count - start), offset=begin + size * start)


def _check_lengths(index: Path, lengths_at: int, sequences: int, token_bytes: int, corpus_bytes: int) -> None:
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
            kind = DType.dtype_from_code(_INDEX_HEAD.unpack(file.read(INDEX_HEAD_BYTES))[2])
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
