"""Real training of small models: on two processes, each pinned to a core of its own, on one, and on several ranks."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = [
    "DYNAMIC",
    "SMALL",
    "prepare_corpus",
    "read_events",
    "run_ranks",
    "step_milliseconds",
    "train_alone",
    "train_pinned",
]

REPOSITORY = Path(__file__).resolve().parent.parent
DYNAMIC = "examples/dynamic_models/pretrain.py"
# Of every model that trains on the corpus.
SMALL = (
    "--device cpu --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --eval-interval 100000 "
    "--eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 258 --null-tokenizer-eod-id 256 "
    "--null-tokenizer-pad-id 257 --split 100,0,0"
)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_TIMEOUT = 3600.0  # seconds of one run
_STEP = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([0-9.]+)")
_PIN = (
    "import os, runpy, sys; cores = sorted(os.sched_getaffinity(0)); "
    "os.sched_setaffinity(0, {cores[int(os.environ['LOCAL_RANK']) % len(cores)]}); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def prepare_corpus(folder: Path, lengths: Sequence[int] = ()) -> list[str]:
    """Write a corpus into `folder`; returns Megatron-LM's flags. Its text is the source of Python's standard library, a
    file a document, or the beginning of one of its modules, in documents of `lengths` tokens if these are given."""
    prefix, source = str(folder / "corpus"), ["--stdlib"]
    if lengths:
        text = Path(os.__file__).read_text(encoding="utf-8").encode("ascii", "replace").decode()
        lines = [json.dumps({"text": text[: length - 1]}) for length in lengths]  # and a token that ends the document
        (folder / "documents.jsonl").write_text("\n".join(lines))
        source = ["--input", str(folder / "documents.jsonl")]
    prepare = [sys.executable, str(REPOSITORY / "scripts" / "prepare_data.py"), *source, "--append-eod"]
    subprocess.run([*prepare, "--output-prefix", prefix], check=True, capture_output=True, timeout=_TIMEOUT)
    return ["--data-path", prefix]


def train_pinned(flags: Sequence[str], program: str = "pretrain_gpt.py") -> str:
    """Train on two pinned processes. Returns what they print. Raises SystemExit where training fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-c", _PIN, str(REPOSITORY / program), *flags]
    return _output(command, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def train_alone(flags: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Train a dynamic model in one process and one thread. Raises SystemExit where training fails."""
    _output([sys.executable, str(REPOSITORY / DYNAMIC), *flags], environment)


def run_ranks(module: str, ranks: int, arguments: Sequence[str]) -> None:
    """Run a module on gloo ranks. Raises SystemExit where one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    _output([*command, "-m", module, *arguments])


def _output(command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> str:
    around = os.environ | _ONE_THREAD | environment
    done = subprocess.run(command, cwd=REPOSITORY, env=around, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise SystemExit(f"training failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def read_events(report: Path) -> list[dict[str, Any]]:
    """The events of a run with `--balance-report`."""
    return [json.loads(line) for line in (report / "events.jsonl").read_text().splitlines()]


def step_milliseconds(flags: Sequence[str], program: str = "pretrain_gpt.py") -> list[float]:
    """The milliseconds of each step of `train_pinned`, with --log-interval 1."""
    return [float(found[2]) for found in _STEP.finditer(train_pinned(flags, program))]
