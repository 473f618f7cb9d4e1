"""Comparison of what all ranks are about to do: flags, code, device, data and launch.

Megatron-LM does not compare the flags of its ranks. If they differ, ranks wait for each other until a timeout, fail in
an exchange, or train on with different learning rates. Here each rank posts a digest to the job's store; rank 0
compares the digests and, only if they differ, the values behind them. With a thousand ranks that is a thousand short
writes and one read.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import balancing
from balancing.launch import detect_launch
from megatron.balanced.trainer.config import BalanceConfig, cluster_from_flags
from megatron.balanced.trainer.rendezvous import has_store, open_store, rank, wait_for, world_size
from megatron.balanced.trainer.watchdog.failure import OthersFailed, failed_elsewhere
from megatron.balanced.trainer.watchdog.stall import name_ranks

__all__ = ["check_agreement", "check_record"]

_START_SECONDS = 600.0  # for all ranks to reach the comparison
_ASKED = 16  # at most so many ranks, each with another digest, post their values
_SHOWN = 3  # differences named in the error

# Flags whose values may differ between ranks: the rank itself, and paths, which may differ between hosts. Of a path,
# only whether it is given is compared. The content of `--cluster` and the size of the corpus are compared, too.
_RANK = ("rank", "local_rank")
_PLACES = (
    "balance_config", "balance_report", "bert_load", "cluster", "ict_load", "load", "merge_file",
    "pretrained_checkpoint", "result_rejected_tracker_filename", "save", "tokenizer_model", "vocab_file",
)  # fmt: skip
_ENDINGS_OF_PLACES = ("_path", "_dir", "_file")

_comparisons = itertools.count()  # of this process: each comparison uses its own keys in the store


def check_agreement(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Raise the same ValueError on all ranks unless their flags, code, device and data agree.

    args: validated by Megatron-LM. Raises OthersFailed if another rank fails before it gets here.
    """
    if not has_store():  # one rank, or a dry run
        return
    given = {flag.split("=")[0] for flag in sys.argv if flag.startswith("--")}
    _check(_values(args, config), given, "start all ranks with the same flags, code and data")


def check_record(resumed: argparse.Namespace | None) -> None:
    """Raise as `check_agreement` unless all ranks have read the same of the run that they resume: on a network file
    system a host may see an older checkpoint. resumed: its arguments."""
    if not has_store():
        return
    known = {} if resumed is None else vars(resumed)
    record = {name: known[name] for name in sorted(known) if name.startswith(("balance", "iteration"))}
    way_out = "start again when every host sees the newest checkpoint in --load"
    _check({"the record in the checkpoint of --load": repr(record)}, set(), way_out)


def _check(values: dict[str, str], given: set[str], way_out: str) -> None:
    try:
        line = _compare(values, given)
    except dist.DistError as error:
        raise OthersFailed(f"the job's store does not answer: {error}") from error
    if line is not None:
        raise ValueError(f"{line}; {way_out}")


def _values(args: argparse.Namespace, config: BalanceConfig) -> dict[str, str]:
    """The values that must be the same on all ranks: name as the user knows it -> value as text."""
    values = dict(vars(args))
    for field in dataclasses.fields(config):
        part = getattr(config, field.name)
        parts = vars(part) if dataclasses.is_dataclass(part) else {field.name: part}
        values |= {name if name in values else f"{field.name}.{name}": value for name, value in parts.items()}
    told = {}
    for name, value in values.items():
        if name in _PLACES or name.endswith(_ENDINGS_OF_PLACES):
            value = bool(value)
        if name not in _RANK:
            told["--" + name.replace("_", "-")] = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return told | {
        "the version of Megatron-Balance": balancing.__version__,
        "the hash of its source": _source(),
        "the version of Python": platform.python_version(),
        "the version of NumPy": np.__version__,
        "the version of torch": torch.__version__,
        "the version of megatron-core": sys.modules["megatron.core"].__version__,
        "the content of --cluster": repr(cluster_from_flags(config, args.world_size)),
        "the size of the corpus": _corpus(args),
        **({"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
            "the number of ranks of its node": str(detect_launch().ranks_per_node)} if config.balances else {}),
    }  # fmt: skip


def _source() -> str:
    """A hash of the source files of `megatron.balanced` and `balancing`. Takes 10 to 40 ms for 250 files."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(balancing.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _corpus(args: argparse.Namespace) -> str:
    """The size of the index of each corpus, as text. With `--sft`, the size of each file of conversations."""
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, per_split = get_blend_and_blend_per_split(args)
    paths = [path for part in (blend, *(per_split or ())) if part for path in part[0]]
    files = [Path(path if args.sft else f"{path}.idx") for path in paths if "://" not in path]
    return f"{[file.stat().st_size for file in files]} bytes of index"


def _compare(values: dict[str, str], given: set[str]) -> str | None:
    """One line that says how the ranks differ, the same on all ranks; None if they agree.

    given: flags on the command line. Differences in these are named first.
    """
    own, world = rank(), range(world_size())
    text = json.dumps({"values": values, "given": sorted(given)})
    store = dist.PrefixStore(f"{next(_comparisons)}", open_store("agreement"))
    store.set(f"digest/{own}", hashlib.sha256(json.dumps(values).encode()).hexdigest())
    if own == 0:
        keys = [f"digest/{peer}" for peer in world]
        _wait(store, keys)
        ranks: dict[str, list[int]] = {}
        for peer, digest in zip(world, store.multi_get(keys), strict=True):
            ranks.setdefault(digest.decode(), []).append(peer)
        asked = [known[0] for known in ranks.values()][:_ASKED] if len(ranks) > 1 else []
        store.set("asked", json.dumps(asked))
    else:
        _wait(store, ["asked"])
        asked = json.loads(store.get("asked"))
    if not asked:
        return None
    if own in asked:
        store.set(f"values/{own}", text)
    if own == 0:
        _wait(store, [f"values/{peer}" for peer in asked])
        answers = [json.loads(store.get(f"values/{peer}")) for peer in asked]
        store.set("line", _difference(list(ranks.values()), answers))
    _wait(store, ["line"])
    return store.get("line").decode()


def _wait(store: dist.Store, keys: list[str]) -> None:
    """Wait until all keys are set, at most ten minutes, unless a rank fails meanwhile."""

    def look() -> None:
        if failed_elsewhere():
            raise OthersFailed("another rank has failed")

    if not wait_for(store, keys, _START_SECONDS, look):
        missing = ", ".join(key for key in keys if not store.check([key]))
        raise ValueError(f"waited {_START_SECONDS:.0f} s for all ranks to start; missing in the store: {missing}")


def _difference(ranks: list[list[int]], answers: list[dict[str, Any]]) -> str:
    """One line on the first `_SHOWN` differences.

    ranks: [answer] -> the ranks with that answer's digest.
    answers: `values` and `given` of one rank of each digest.
    """
    given = {flag for answer in answers for flag in answer["given"]}
    differing = {}
    for name in dict.fromkeys(name for answer in answers for name in answer["values"]):
        by_value: dict[str, list[int]] = {}
        for known, answer in zip(ranks, answers, strict=False):
            by_value.setdefault(answer["values"].get(name, "absent"), []).extend(known)
        if len(by_value) > 1:
            differing[name] = " and ".join(f"{value} on {name_ranks(known)}" for value, known in by_value.items())
    names = sorted(differing, key=lambda name: (name != "--device", name not in given, name.startswith("--")))
    words = [f"{name} is {differing[name]}" for name in names[:_SHOWN]]
    more = f" (and {len(names) - _SHOWN} more)" * (len(names) > _SHOWN)
    return f"ranks differ: {'; '.join(words)}{more}"
