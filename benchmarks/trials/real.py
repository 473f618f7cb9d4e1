"""The bad cases in real training: two processes with a core each.

A small mixture-of-experts GPT trains with `pretrain_gpt.py`'s own code, expert parallelism 2 and data parallelism 2.
Compute and transfers are real. So that jobs are short, rounds of trials begin every 100 steps and may take a fifth of
all steps, rather than every 1,000 and a hundredth, and jobs have a tenth of a case's steps.

- Loads: noise with the wanted shares is added to the routers' logits, so a token's experts are drawn.
- Dear transfers: few tokens, so that replicas take longer to send than they save.
- A noisy rank: another process computes on its core in bursts.
"""

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from balancing.trials import TrialConfig
from benchmarks.pinned import SMALL, prepare_corpus, train_pinned
from benchmarks.settings import settings
from benchmarks.trials.cases import CASES, Case, Watch

__all__ = ["CONFIG", "flags_of", "run_cases", "run_job", "steps_of"]

_FASTER = 10
CONFIG = TrialConfig(interval=TrialConfig().interval // _FASTER, share=0.2)
_MODEL = (
    f"{SMALL} "
    "--num-layers 2 --ffn-hidden-size 512 --normalization RMSNorm --swiglu --disable-bias-linear --num-experts 8 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--lr 1e-6 --log-interval 100000 --num-workers 0"
)
_FEW_TOKENS = (
    "--hidden-size 256 --num-attention-heads 4 --seq-length 64 --moe-router-topk 2 --moe-ffn-hidden-size 1024 "
    "--micro-batch-size 1 --global-batch-size 2"
)
_TOKENS = (
    "--hidden-size 256 --num-attention-heads 4 --seq-length 256 --moe-router-topk 2 --moe-ffn-hidden-size 768 "
    "--micro-batch-size {} --global-batch-size {}"
)
_DOCUMENTS_TOO = (
    "--hidden-size 128 --num-attention-heads 8 --seq-length 1024 --moe-router-topk 2 --moe-ffn-hidden-size 384 "
    "--micro-batch-size 1 --global-batch-size 2 --dataloader-inter-document-masking --balance-sequences"
)
# Of tokens, by expert. Rank 0 has the first four: 1.03 times the mean, or 1.6 times.
_SHARES = {"even": (1.25, *[1.0] * 7), "uneven": (7.0, 2.0, 1.5, 1.0, *[0.5] * 4)}
_BURSTS = (
    "import random, time; from balancing.process import end_with_parent; end_with_parent(); draw = random.Random(0)\n"
    "while True:\n"
    "    end = time.perf_counter() + draw.expovariate(10)\n"
    "    while time.perf_counter() < end: pass\n"
    "    time.sleep(draw.expovariate(3))\n"
)


def steps_of(case: Case) -> int:
    """Steps of the real job."""
    return max(20, case.steps // _FASTER)


def flags_of(case: Case) -> list[str]:
    """Command line of the real job, without the data."""
    if case.documents is not None:
        model = _DOCUMENTS_TOO
    elif case.loads == "even":
        model = _FEW_TOKENS
    else:  # replicas pay where loads are uneven, and less so with fewer tokens
        model = _TOKENS.format(*((3, 6) if "experts" in case.dear else (2, 8)))
    trials = settings("trials", interval=CONFIG.interval, share=CONFIG.share)
    length = model.split("--seq-length ")[1].split()[0]
    return (
        f"{_MODEL} {model} --max-position-embeddings {length} --balance-experts --train-iters {steps_of(case)} {trials}"
    ).split()


def run_cases(show: Callable[[dict[str, Any]], None]) -> None:
    """Run all cases that can be made. show: told each row of the table."""
    lengths = np.random.default_rng(0).integers(116, 140, 256).tolist()  # even documents
    with tempfile.TemporaryDirectory() as name:
        data = prepare_corpus(Path(name), lengths)
        for number, case in enumerate(CASES):
            if case.only_emulated:
                continue
            said = train_pinned([str(number), *flags_of(case), *data], "benchmarks/trials/real.py")
            (row,) = [line for line in said.splitlines() if line.startswith("row ")]
            show(json.loads(row.removeprefix("row ")))


def run_job(case: Case, args: Any, config: Any) -> dict[str, Any]:
    """Run the job of a case on this rank. Returns its row of the table.

    args, config: of `megatron.balanced.trainer.arguments.parse_arguments`, which chooses the device.
    """
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trainer.train import train
    from megatron.balanced.trials.step_trials import StepTrials

    rows: list[dict[str, Any]] = []

    class Job(StepCallback):
        """Makes the case of the job, and watches it."""

        def __init__(self) -> None:
            self._watch = Watch(case, args.train_iters, config.trials)
            self._draw = torch.Generator().manual_seed(args.rank)
            self._seconds: list[float] = []
            self._bursts: subprocess.Popen[bytes] | None = None

        def attach(self, chunks: list[Any]) -> None:
            routers = [one for chunk in chunks for one in chunk.modules() if isinstance(one, TopKRouter)]
            for router in routers:
                router.gating = functools.partial(self._route, router.gating)
            if case.noisy and args.rank == 1:
                self._bursts = subprocess.Popen([sys.executable, "-c", _BURSTS])  # on this rank's core

        def begin_step(self, iteration: int, config: Any) -> None:
            shares = torch.tensor(_SHARES[case.loads_at(iteration) or "even"])
            self._shares, self._begin = torch.log(shares), time.perf_counter()
            if iteration == case.slow:
                time.sleep(9 * float(np.median(self._seconds)))

        def end_step(self) -> None:
            self._seconds.append(time.perf_counter() - self._begin)
            self._watch.add(self._seconds[-1], self.run.left_out)

        def end_training(self) -> None:
            if self._bursts is not None:
                self._bursts.kill()
                self._bursts.wait()
            (trials,) = (one for one in self.run.first if isinstance(one, StepTrials))
            rows.append(self._watch.row(trials.gains))

        def _route(self, gating: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
            logits = gating(tokens)
            noise = torch.empty(logits.shape).exponential_(generator=self._draw).log()
            return logits + self._shares - noise  # the largest of these is drawn by the shares

    train(args, config, [Job()])
    return rows[0]


def _run_as_rank() -> None:
    from balancing.command_line import print_any_name
    from megatron.balanced.trainer.arguments import parse_arguments

    case = CASES[int(sys.argv.pop(1))]
    print_any_name()
    args, config = parse_arguments()
    row = run_job(case, args, config)
    if args.rank == 0:
        print(f"row {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    _run_as_rank()
