"""Data that cannot be trained on, found before anything is built: missing, cut off, empty, or empty after the split.

Megatron-LM meets it on the ranks that read data, as an assertion deep in a dataset, or as a loop without end.
"""

import argparse
import importlib.util
import re
import struct
from pathlib import Path

from megatron.balanced.checks import OnThisMachine

__all__ = ["check_data"]

# The head of an .idx file: a magic word, the format's version, the code of the token type, sequences, documents + 1.
_INDEX_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's


def check_data(args: argparse.Namespace) -> None:
    """Raise ValueError for data that is not there or cannot be read. Before Megatron validates `args`."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [part for part in (blend, *(per_split or ())) if part]
    if args.mock_data and blends:
        raise ValueError(f"--mock-data contradicts the data path {blends[0][0][0]}; drop one of them")
    if not args.mock_data and not blends:
        raise ValueError("there is no data to train on: give --data-path PREFIX, or --mock-data to try without")
    if args.sft:
        missing = [name for name in ("datasets", "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--sft needs {' and '.join(missing)}; pip install {' '.join(missing)}")
    shares = _check_split(args, args.split or _DEFAULT_SPLIT) if blend else None
    for paths, _ in blends:
        for path in paths:
            if "://" in path:  # in an object store, which Megatron reads by itself
                continue
            if args.sft:
                _check_file(Path(path), "one conversation a line, as JSON")
            else:
                sequences = _check_indexed(path)
                if shares:
                    _check_shares(path, sequences, shares, args.split or _DEFAULT_SPLIT)


def _check_split(args: argparse.Namespace, split: str) -> list[tuple[float, float] | None]:
    """Where the train, validation and test set each begin and end, as shares of the documents; None for no set."""
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
    """Megatron would look for samples in an empty set forever."""
    for name, share in zip(("training", "validation", "test"), shares, strict=True):
        if share and round(share[0] * documents) == round(share[1] * documents):
            raise OnThisMachine(
                f"{prefix} has {documents} document(s), and --split {split} leaves its {name} set without any; give it "
                f"a larger weight or none in --split, or train on more documents"
            )


def _check_file(path: Path, content: str) -> int:
    """Size in bytes. Raises OnThisMachine when there is no such file or nothing in it."""
    if not path.is_file():
        hint = "; --data-path takes the name without .bin or .idx" if path.stem.endswith((".bin", ".idx")) else ""
        raise OnThisMachine(f"{path} does not exist: it should hold {content}{hint}")
    size = path.stat().st_size
    if size == 0:
        raise OnThisMachine(f"{path} is empty: it should hold {content}")
    return size


def _check_indexed(prefix: str) -> int:
    """A pair of .bin and .idx that belong together and are whole, judged by its ends, however large it is.

    Returns how many sequences there are, which Megatron splits as documents.
    """
    from megatron.core.datasets.indexed_dataset import DType

    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    again = "write the pair again with scripts/prepare_data.py"
    index_size = _check_file(index, "the index of a tokenized corpus (scripts/prepare_data.py writes it)")
    with index.open("rb") as file:
        head = file.read(_INDEX_HEAD.size)
        if not head.startswith(_MAGIC[: len(head)]):
            raise OnThisMachine(f"{index} is not an index of tokenized data; {again}")
        if len(head) < _INDEX_HEAD.size:
            raise OnThisMachine(f"{index} is truncated: it has {index_size} bytes; {again}")
        _, version, code, sequences, documents = _INDEX_HEAD.unpack(head)
        if version != 1 or code not in {kind.value for kind in DType}:
            raise OnThisMachine(
                f"{index} has format version {version} and token type {code}, which are unknown; {again}"
            )
        lengths_end = _INDEX_HEAD.size + 4 * sequences
        pointers_end = lengths_end + 8 * sequences
        needed = pointers_end + 8 * documents
        if index_size < needed:
            raise OnThisMachine(f"{index} is truncated: it has {index_size} bytes of {needed}; {again}")
        if sequences == 0:
            raise OnThisMachine(f"{prefix} is an empty corpus: its index counts no documents; train on another")
        file.seek(lengths_end - 4)
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(pointers_end - 8)
        (last_start,) = struct.unpack("<q", file.read(8))
    needed = last_start + last_length * DType.size(code)
    if needed == 0:
        raise OnThisMachine(f"{prefix} is an empty corpus: its {sequences} documents have no tokens; train on another")
    size = _check_file(tokens, "the tokens of a corpus (scripts/prepare_data.py writes them)")
    if size < needed:
        raise OnThisMachine(
            f"{tokens} is truncated or belongs to another index: it has {size} bytes of {needed}; {again}"
        )
    return sequences
