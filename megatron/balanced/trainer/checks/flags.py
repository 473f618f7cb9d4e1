"""Checks of the installation, the parallel layout, folders and data, before anything is built.

Megatron-LM finds most of these faults minutes later and on one rank only, as an assertion in a data loader or a process
group. Here each is a ValueError of one line with the value and the way out.
"""

import argparse
import importlib.util
import os
import re
import struct
import tempfile
from pathlib import Path

from balancing.pipeline.layout import from_layout
from megatron.balanced.shared.errors import LocalError
from megatron.balanced.trainer.checks.checkpoints import nothing_to_load
from megatron.balanced.trainer.checks.corpus import INDEX_HEAD, check_lengths
from megatron.balanced.trainer.prediction import has_tail, tied_in_pipeline

__all__ = [
    "check_data",
    "check_folders",
    "check_layout",
    "check_saves",
]

_MAGIC = b"MMIDIDX\x00\x00"
_DEFAULT_SPLIT = "969, 30, 1"  # Megatron's


def check_layout(args: argparse.Namespace) -> None:
    """Raise ValueError for a layout with which Megatron-LM trains wrongly or fails with a misleading message. Called
    before it validates `args`."""
    instances, stages = args.num_distributed_optimizer_instances, args.pipeline_model_parallel_size
    if instances > 1 and args.overlap_grad_reduce and stages > 1 and args.align_grad_reduce:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} with --overlap-grad-reduce and "
            f"--pipeline-model-parallel-size {stages}: Megatron-LM reduces gradients twice, so that they are "
            f"{instances} times too large; add --no-align-grad-reduce or drop --overlap-grad-reduce"
        )
    layers = (args.num_layers or stages) + sum(
        (args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split)
    )
    if layers < stages and not (args.pipeline_model_parallel_layout or args.hybrid_layer_pattern):
        raise ValueError(
            f"--pipeline-model-parallel-size {stages} is more than --num-layers {args.num_layers}; use at most {layers}"
        )


def check_folders(args: argparse.Namespace) -> None:
    """Raise ValueError for a folder that cannot be written to. Creates missing ones."""
    for name in ("balance_report", "save", "tensorboard_dir", "data_cache_path"):
        if getattr(args, name):
            _check_writable(f"--{name.replace('_', '-')} {getattr(args, name)}", getattr(args, name))


def _check_writable(what: str, folder: str) -> None:
    if "://" in folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise LocalError(f"{what} cannot be written to ({error.strerror}); name a folder that can") from error


def check_saves(args: argparse.Namespace) -> None:
    """Raise ValueError for an interval of saving without --save, and for a model whose checkpoint Megatron-LM fails to
    write or to read."""
    given = None
    if args.save:
        given, verb, instead = f"--save {args.save}", "write", "add --untie-embeddings-and-output-weights"
    elif args.load and nothing_to_load(args) is None:
        given, verb, instead = f"--load {args.load}", "read", "use --pipeline-model-parallel-size 1"
    if given and args.ckpt_format != "torch" and (tied := tied_in_pipeline(args)) is not None:
        raise ValueError(
            f"{given} with {tied} in a pipeline: Megatron-LM cannot {verb} a checkpoint if embedding and head share "
            f"weights; {instead}"
        )
    given = next((f"--{name} {folder}" for name in ("save", "load") if (folder := getattr(args, name))), None)
    if given and (stage := _stage_without_parameters(args)):
        raise ValueError(
            f"{given} with --pipeline-model-parallel-layout {args.pipeline_model_parallel_layout}: stage {stage} has "
            "no parameters, and Megatron-LM cannot load a checkpoint there; give it a layer, or drop the stage"
        )
    for kind in ("params", "activations", "tokens-per-expert", "wgrads", "dgrads"):
        flag = f"--save-{kind}-interval"
        interval = getattr(args, flag[2:].replace("-", "_"))
        if interval and not args.save:
            raise ValueError(f"{flag} {interval} needs a folder; give --save DIR, or drop it")


def _stage_without_parameters(args: argparse.Namespace) -> int | None:
    """A stage between the others that has nothing. Of several chunks Megatron-LM leaves empty ones out."""
    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if not layout or stages < 3 or has_tail(args):
        return None
    plan = from_layout(str(layout), stages)
    return next((stage for stage in range(1, stages - 1) if plan.virtual == 1 and not plan.chunks[stage][0]), None)


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
        head = file.read(INDEX_HEAD.size)
        if not head.startswith(_MAGIC[: len(head)]):
            raise LocalError(f"{index} is not an index of tokenized data; {again}")
        if len(head) < INDEX_HEAD.size:
            raise LocalError(f"{index} is truncated: it has {index_size} bytes; {again}")
        _, version, code, sequences, documents = INDEX_HEAD.unpack(head)
        if version != 1 or code not in {kind.value for kind in DType}:
            raise LocalError(f"{index} has format version {version} and token type {code}, which are unknown; {again}")
        lengths_end = INDEX_HEAD.size + 4 * sequences
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
    check_lengths(index, INDEX_HEAD.size, sequences, DType.size(code), size)
    return sequences
