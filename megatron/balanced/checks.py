"""Bad input found before anything is built, while one clear line can still be said about it.

Megatron-LM meets most of it minutes later, on one of many ranks, as an assertion in a data loader or a process group.
"""

import argparse
import importlib.util
import math
import os
import struct
import tempfile
from pathlib import Path

from balancing.installed import find_megatron

__all__ = ["MEGATRON_VERSIONS", "OnThisMachine", "check_data", "check_folders", "check_layout", "check_megatron"]

MEGATRON_VERSIONS = ("0.19.2",)

# The head of an .idx file: a magic word, the format's version, the code of the token type, sequences, documents + 1.
_INDEX_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"


class OnThisMachine(ValueError):
    """Bad input that may be bad on this machine alone, such as a missing file."""


def check_megatron() -> None:
    """Raise ValueError unless the Megatron-LM that an import would take is one that this package was written for."""
    found = find_megatron()
    wanted = f"pip install megatron-core=={MEGATRON_VERSIONS[-1]}"
    if found["version"] is None:
        raise ValueError(f"Megatron-LM is not installed; {wanted}")
    if found["version"] not in MEGATRON_VERSIONS:
        raise ValueError(
            f"megatron-core {found['version']} (in {Path(found['core']).parent}) is not supported, only "
            f"{' and '.join(MEGATRON_VERSIONS)}; {wanted}"
        )
    if not found["training"]:
        raise ValueError(f"megatron-core {found['version']} is here without megatron.training; {wanted}")


def check_layout(args: argparse.Namespace) -> None:
    """Raise ValueError when ranks or batch do not divide into the groups asked for, or two precisions are asked for.

    Before Megatron validates `args`, for it does not name the values.
    """
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 contradicts --fp16; drop one of them")
    tensor = args.tensor_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    pipeline = ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size)
    context = ("--context-parallel-size", args.context_parallel_size)
    expert = ("--expert-model-parallel-size", args.expert_model_parallel_size)
    for flags in (
        [("--tensor-model-parallel-size", tensor), pipeline, context],
        [("--expert-tensor-parallel-size", expert_tensor), pipeline, expert],
    ):
        for flag, size in flags:
            if size < 1:
                raise ValueError(f"{flag} {size} must be at least 1")
        product = math.prod(size for _, size in flags)
        if args.world_size % product:
            factors = " x ".join(f"{flag} {size}" for flag, size in flags)
            raise ValueError(
                f"{factors} = {product} does not divide the {args.world_size} rank(s); start a multiple of {product} "
                "(torchrun --nproc-per-node, times nodes) or change the sizes"
            )
    replicas = args.world_size // (tensor * args.pipeline_model_parallel_size * args.context_parallel_size)
    batch, micro_batch = args.global_batch_size, args.micro_batch_size
    adapts = args.decrease_batch_size_if_needed or args.step_batch_size_schedule
    if batch and micro_batch and not adapts and batch % (micro_batch * replicas):
        raise ValueError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro_batch} x {replicas} "
            f"data-parallel rank(s); use one of {micro_batch * replicas}"
        )


def check_folders(args: argparse.Namespace) -> None:
    """Raise ValueError for a folder that cannot be written to. Makes those that are not there."""
    for name in ("balance_report", "save", "tensorboard_dir", "data_cache_path"):
        if getattr(args, name):
            _check_writable(f"--{name.replace('_', '-')} {getattr(args, name)}", getattr(args, name))


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
    for paths, _ in blends:
        for path in paths:
            if "://" in path:  # in an object store, which Megatron reads by itself
                continue
            if args.sft:
                _check_file(Path(path), "one conversation a line, as JSON")
            else:
                _check_indexed(path)


def _check_file(path: Path, content: str) -> int:
    """Size in bytes. Raises OnThisMachine when there is no such file or nothing in it."""
    if not path.is_file():
        hint = "; --data-path takes the name without .bin or .idx" if path.stem.endswith((".bin", ".idx")) else ""
        raise OnThisMachine(f"{path} does not exist: it should hold {content}{hint}")
    size = path.stat().st_size
    if size == 0:
        raise OnThisMachine(f"{path} is empty: it should hold {content}")
    return size


def _check_indexed(prefix: str) -> None:
    """A pair of .bin and .idx that belong together and are whole, judged by its ends, however large it is."""
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


def _check_writable(what: str, folder: str) -> None:
    if "://" in folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OnThisMachine(f"{what} cannot be written to ({error.strerror}); name a folder that can") from error
