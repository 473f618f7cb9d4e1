"""Checks of checkpoints and output folders, and causes and ways out of errors while these are read or written.

`check_load` reads the small files of a checkpoint before anything is built. With a tracker that it cannot read,
Megatron-LM would exit with code 0; without one it would train from iteration 0. Other errors come from deep inside
Megatron-LM or torch, on all ranks; `explain_checkpoint` finds their cause and says it in one line.
"""

import argparse
import contextlib
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from megatron.balanced.shared.errors import LocalError
from megatron.balanced.trainer.prediction import has_tail, tied_in_pipeline

__all__ = [
    "arguments_of_checkpoint",
    "check_folders",
    "check_load",
    "check_saves",
    "explain_checkpoint",
    "full_folders",
    "gave_up_loading",
    "megatrons_arguments",
    "nothing_to_load",
]

_TRACKER = "latest_checkpointed_iteration.txt"
_MOST_CHARACTERS = 300  # of a reason
_FULL_BYTES = 1 << 20  # free, below which a disk counts as full
# What torch says of a file that is shorter than, or differs from, what its index says.
_BROKEN = re.compile(r"PytorchStreamReader|unexpected EOF|Ran out of input|pickle data was truncated|invalid load key")
_OUTPUTS = ("save", "balance_report", "tensorboard_dir", "data_cache_path")


def megatrons_arguments() -> Any:
    """Megatron-LM's arguments once they are parsed; None before."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def nothing_to_load(args: argparse.Namespace) -> str | None:
    """A note for the user if `--load` names a folder without a checkpoint; None if it has one or is not given."""
    if not args.load or "://" in args.load or args.ckpt_step or args.non_persistent_ckpt_type is not None:
        return None
    if (Path(args.load) / _TRACKER).is_file() or args.pretrained_checkpoint:
        return None
    if iterations := _iterations(Path(args.load)):
        return (
            f"--load {args.load} has no {_TRACKER}: training starts from iteration 0, although there are checkpoints "
            f"of iterations {iterations}; name one with --ckpt-step"
        )
    return f"--load {args.load} has no checkpoint: training starts from iteration 0"


def check_load(args: argparse.Namespace) -> None:
    """Raise LocalError if the small files of the named checkpoint show that it cannot be loaded."""
    note = nothing_to_load(args)
    if note is not None and args.exit_on_missing_checkpoint:
        raise LocalError(f"{note.split(':')[0]}, and --exit-on-missing-checkpoint is given; name a folder that has one")
    if not args.load or "://" in args.load or note is not None or args.non_persistent_ckpt_type is not None:
        return
    folder, flag = Path(args.load), "--load"
    if args.pretrained_checkpoint and not (folder / _TRACKER).is_file():
        folder, flag = Path(args.pretrained_checkpoint), "--pretrained-checkpoint"
        if not (folder / _TRACKER).is_file():
            raise LocalError(f"neither --load {args.load} nor {flag} {folder} has a {_TRACKER}; name a folder that has")
    text = _iteration(folder, args.ckpt_step)
    if text != "release" and not (text.isascii() and text.isdigit()):
        raise LocalError(
            f"{folder / _TRACKER} should hold an iteration and holds {text[:40]!r}; write one of {_iterations(folder)} "
            "into it"
        )
    checkpoint = _place(folder, text)
    instead = _instead(folder, text)
    if not checkpoint.is_dir():
        raise LocalError(f"{flag} {folder} has no checkpoint of iteration {text} ({checkpoint.name}); {instead}")
    if any(checkpoint.glob("mp_rank_0*")):  # the old format
        return
    try:
        json.loads((checkpoint / "metadata.json").read_text(errors="replace"))
        if not (checkpoint / ".metadata").stat().st_size:
            raise ValueError("empty")
    except (OSError, ValueError) as error:
        fault = "is damaged" if isinstance(error, FileNotFoundError | ValueError) else "cannot be loaded"
        raise LocalError(
            f"checkpoint {checkpoint} {fault}: its metadata.json or .metadata cannot be read ({error}); {instead}"
        ) from error


def arguments_of_checkpoint(args: argparse.Namespace) -> argparse.Namespace | None:
    """Megatron-LM's arguments of the run that `--load` resumes; None without one, and where no checkpoint has them.

    args: after `check_load`.
    """
    if not args.load or "://" in args.load or args.finetune:
        return None
    places = [(Path(args.load), args.ckpt_step)]
    if args.non_persistent_ckpt_type == "global":  # which Megatron-LM loads if it is as new
        places.insert(0, (Path(args.non_persistent_global_ckpt_dir or places[0][0] / "non_persistent"), None))
    named = [(folder, _iteration(folder, step)) for folder, step in places if (folder / _TRACKER).is_file()]
    if not named:
        return None
    from megatron.core.dist_checkpointing import check_is_distributed_checkpoint, load_common_state_dict

    checkpoint = str(_place(*max(named, key=lambda each: int(each[1]) if each[1].isdecimal() else 0)))
    if not check_is_distributed_checkpoint(checkpoint):  # the old format, which holds the weights in the same file
        return None
    found: argparse.Namespace | None = load_common_state_dict(checkpoint).get("args")
    return found


def _iteration(folder: Path, step: int | None) -> str:
    """The iteration to load, as text that need not be a number. step: the one that is asked for, if any."""
    return str(step) if step else (folder / _TRACKER).read_text(errors="replace").strip()


def _place(folder: Path, iteration: str) -> Path:
    return folder / ("release" if iteration == "release" else f"iter_{int(iteration):07d}")


def _iterations(folder: Path) -> list[int]:
    """Iterations of which `folder` has checkpoints."""
    return sorted(int(found[1]) for path in folder.glob("iter_*") if (found := re.fullmatch(r"iter_(\d+)", path.name)))


def gave_up_loading(end: SystemExit) -> str | None:
    """Text on a checkpoint that Megatron-LM could not load, so that it exited with code 0; None for other exits."""
    frames = traceback.extract_tb(end.__traceback__)
    if end.code or _action(frames) != "load" or not frames[-1].filename.endswith("checkpointing.py"):
        return None
    return _cannot_load(None)


def explain_checkpoint(error: BaseException) -> str | None:
    """Text on an error of loading or saving a checkpoint; None for any other error."""
    action = _action(traceback.extract_tb(error.__traceback__))
    if action is None:
        return None
    cause = _cause(error)
    if action == "load":
        return _cannot_load(cause)
    args = megatrons_arguments()
    if args.save is None:
        return "Megatron-LM stops and would save a checkpoint, but --save is not given; it says above why it stops"
    iteration = _local(error, "iteration")  # unknown where a process of --async-save has failed
    what = "a checkpoint" if iteration is None else f"the checkpoint of iteration {iteration}"
    what += " cannot be written"
    if full := full_folders(args):
        return f"{what}: no space is left on the disk of {' and '.join(full)}; free some, and start again"
    return f"{what} to --save {args.save}: {_reason(cause)}"


def full_folders(args: argparse.Namespace) -> list[str]:
    """The flags, with values, of output folders on a full disk."""
    given = {name: getattr(args, name, None) for name in _OUTPUTS}
    return [
        f"--{name.replace('_', '-')} {folder}"
        for name, folder in given.items()
        if folder and os.path.isdir(folder) and shutil.disk_usage(folder).free < _FULL_BYTES
    ]


def _cannot_load(cause: BaseException | None) -> str:
    args = megatrons_arguments()
    folder = Path(args.load or args.pretrained_checkpoint)
    iteration = str(args.ckpt_step or "")
    with contextlib.suppress(OSError):
        iteration = iteration or (folder / _TRACKER).read_text().strip()
    what = f"the checkpoint of iteration {iteration} in {folder}"
    if cause is None:
        return f"Megatron-LM could not load {what} and says why above; {_instead(folder, iteration)}"
    return f"Megatron-LM could not load {what}: {_reason(cause)}; {_way_out(cause, folder, iteration)}"


def _reason(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:_MOST_CHARACTERS]


def _instead(folder: Path, iteration: str) -> str:
    others = [number for number in _iterations(folder) if str(number) != iteration.lstrip("0")]
    return f"load another one with --ckpt-step: {others}" if others else "load one of another folder"


def _way_out(cause: BaseException, folder: Path, iteration: str) -> str:
    instead = _instead(folder, iteration)
    if isinstance(cause, FileNotFoundError):
        return f"restore the file, or {instead}"
    if isinstance(cause, OSError) and cause.errno is not None:
        return f"mend that, or {instead}"
    if isinstance(cause, EOFError | pickle.UnpicklingError) or _BROKEN.search(str(cause)):
        return f"a file is damaged: restore it, or {instead}"
    text = str(cause).replace(str(folder), "").split("not in state dict")[0]  # the rest lists what is in it
    if "parameter group" in text or "optimizer" in text or "entries in state dict" in text:
        return (
            "its optimizer state is of another layout or optimizer (with experts, Megatron-LM stores it in another way "
            "for --expert-model-parallel-size 1): train with that layout, or add --no-load-optim. Saved with "
            "--dist-ckpt-optim-fully-reshardable, the state of a distributed optimizer loads with others as well"
        )
    if "shape mismatch" in text or "size mismatch" in text or "not in state dict" in str(cause):
        return "it is of another model: give the flags it was trained with"
    return instead


def _action(frames: traceback.StackSummary) -> str | None:
    """ "load" or "save" if the error comes from a checkpoint."""
    for frame in frames:
        if frame.filename.endswith(("training/checkpointing.py", "training/async_utils.py")):
            return "load" if "load" in frame.name or frame.name == "read_metadata" else "save"
    return None


def _cause(error: BaseException) -> BaseException:
    """The first error, of this or another rank. torch raises the errors of ranks together as a BaseException."""
    failures = getattr(error, "failures", None)
    while failures:
        error = next(iter(failures.values()))[0]
        failures = getattr(error, "failures", None)
    return error.__cause__ or error


def _local(error: BaseException, name: str) -> Any:
    """The local variable `name` of the innermost function of checkpointing.py that `error` passed through, or None."""
    value = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.endswith("checkpointing.py"):
            value = frame.tb_frame.f_locals.get(name, value)
        frame = frame.tb_next
    return value


def check_folders(args: argparse.Namespace, *, create: bool = True) -> None:
    """Raise ValueError for a folder that cannot be written to. create: missing ones, or look at the ones above them."""
    for name in _OUTPUTS:
        if getattr(args, name):
            _check_writable(f"--{name.replace('_', '-')} {getattr(args, name)}", getattr(args, name), create)


def _check_writable(what: str, folder: str, create: bool) -> None:
    if "://" in folder:
        return
    while not create and not os.path.lexists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    try:
        if create:
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
    from balancing.pipeline.layout import from_layout

    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if not layout or stages < 3 or has_tail(args):
        return None
    plan = from_layout(str(layout), stages)
    return next((stage for stage in range(1, stages - 1) if plan.virtual == 1 and not plan.chunks[stage][0]), None)
