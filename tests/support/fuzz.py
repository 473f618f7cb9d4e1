"""Random command lines train two steps, or are refused with one line and an exit code that is not zero.

    scripts/test.sh --fuzz 500 --seed 0

Flags, choices and kinds of values are those of the parser itself, so a new flag is drawn as soon as it exists. Each
run starts from a small job that trains and adds a few flags at random, so that about half of them still train. A run
that fails is told with its seed, which draws it alone again: `--fuzz 1 --seed SEED`. `--fuzz 1 --each dense` tries
every flag alone instead, with every value that may be drawn for it.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.pool import Hang, Pool
from tests.support.program import parse
from tests.support.settings import scheme_flags
from tests.support.training import MOCK_DATA

__all__ = ["Case", "Runs", "draw", "each", "judge"]

SECONDS = 300.0  # that a run may take
SHOWN = 12000  # characters of what a failed run said
STEPS = 2
SMALL = (
    "--device cpu --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    f"--train-iters {STEPS} --lr 1e-3 --eval-interval 1000 --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--distributed-timeout-minutes 2"
).split()
# Not drawn: what the small job fixes; what asks for another program, for faults or for a service; other trainings.
FIXED = {flag for flag in SMALL if flag.startswith("--")} - {"--position-embedding-type", "--lr", "--num-workers"}
ELSEWHERE = ("--rl-", "--grpo-", "--langrl", "--fault-injector", "--inprocess-", "--wandb", "--one-logger", "--app-tag")
NEVER = {
    "--help", "--perform-rl-step", "--error-injection-rate", "--error-injection-type", "--adlr-autoresume",
    "--exit-duration-in-mins", "--yaml-cfg", "--mock-data", "--data-path", "--enable-ft-package", "--train-samples",
    "--run-workload-inspector-server", "--hidden-size", "--num-layers", "--world-size", "--rank", "--exit-signal",
    "--full-validation",  # Megatron-LM itself fails, at once under tensor parallelism and else when it validates
    "--no-initialization",  # whatever is in memory may be no number
}  # fmt: skip
# With these a run may end before its steps, as it was asked to.
SHORTER = {"--skip-train", "--exit-interval", "--balance-dry-run", "--exit-on-missing-checkpoint",
           "--exit-signal-handler", "--iterations-to-skip"}  # fmt: skip
MOE = "--swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
PACKED = "--dataloader-inter-document-masking"
# Flags that real jobs have, and most jobs can have together.
COMMON = (
    "--untie-embeddings-and-output-weights", "--swiglu", "--disable-bias-linear", "--group-query-attention",
    "--normalization RMSNorm", "--qk-layernorm", "--use-distributed-optimizer", "--overlap-grad-reduce",
    "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather", "--ddp-bucket-size 2000",
    "--clip-grad 0", "--weight-decay 0.1", "--lr-decay-style cosine", "--lr-warmup-iters 1", "--eval-iters 1",
    "--recompute-granularity selective", "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1", "--calculate-per-token-loss", "--save {folder}/save --save-interval 1",
    "--balance-report {folder}/report", "--tensorboard-dir {folder}/board", "--num-workers 1", "--seed 7",
    "--eval-interval 1 --eval-iters 1", "--cross-entropy-loss-fusion", "--no-rope-fusion", "--squared-relu",
    "--log-throughput", "--hidden-dropout 0", "--attention-dropout 0", "--make-vocab-size-divisible-by 64",
    "--freeze-layers 1", scheme_flags(prune_sparsity=0.5, prune_start=0, prune_end=1, prune_interval=1),
    scheme_flags(early_exit_layers=[1, 2], early_exit_threshold=0.5), "--optimizer sgd",
    scheme_flags(mixture_of_depths=0.5), "--ckpt-format torch_dist", "--mtp-num-layers 1",
    scheme_flags(sparse_attention="blocks", sparse_attention_block=8),
)  # fmt: skip
COMMON_MOE = (
    "--moe-aux-loss-coeff 1e-2", "--moe-z-loss-coeff 1e-3", "--moe-router-topk 1",
    "--moe-shared-expert-intermediate-size 32", "--moe-router-score-function sigmoid", "--moe-permute-fusion",
    "--moe-router-load-balancing-type seq_aux_loss", "--moe-router-enable-expert-bias",
    "--moe-layer-freq 2 --ffn-hidden-size 64",
    "--moe-expert-capacity-factor 2", "--moe-token-dispatcher-type allgather",
)  # fmt: skip
# Ranks and flags of jobs that train.
DENSE = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 1 --global-batch-size 4"
BASES = {
    "dense": (2, DENSE),
    "experts": (
        4,
        f"{DENSE} {MOE} {PACKED} --attention-dropout 0 --expert-tensor-parallel-size 1 --balance-experts "
        "--expert-model-parallel-size 2 --balance-sequences --pipeline-model-parallel-size 2 --balance-layers",
    ),
    "tensor": (2, f"{DENSE} --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16"),
}  # fmt: skip
WORDS = ("1", "2", "0.5", "none", "1,2", "{folder}/given")  # of a flag that takes any text


@dataclass(frozen=True)
class Option:
    """A flag as the parser has it.

    kind: "switch", "int", "float", "choice", "bool" or "text".
    count: the number of values that it takes.
    """

    flag: str
    kind: str
    choices: tuple[str, ...] = ()
    default: Any = None
    count: int = 1


@dataclass(frozen=True)
class Case:
    """One command line. packed: whether it trains on documents instead of Megatron's mock data."""

    seed: int
    ranks: int
    flags: tuple[str, ...]
    packed: bool


def options() -> list[Option]:
    """What the parser knows, to be called where Megatron-LM was imported on the CPU."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron.balanced.trainer.arguments import add_balance_flags

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_balance_flags(parser)
    found = []
    for action in parser._actions:
        for flag in action.option_strings:
            if not flag.startswith("--") or flag in FIXED | NEVER or flag.startswith(ELSEWHERE):
                continue
            count = {None: 1, 0: 0, "?": 1, "+": 1, "*": 1}.get(action.nargs, action.nargs)  # type: ignore[call-overload]
            default = action.default if isinstance(action.default, int | float | str) else None
            if count == 0:
                found.append(Option(flag, "switch", count=0))
            elif action.choices:
                names = [getattr(choice, "name", choice) for choice in action.choices]
                found.append(Option(flag, "choice", tuple(map(str, names)), default, count))
            else:
                kind = {int: "int", float: "float", bool: "bool"}.get(action.type, "text")  # type: ignore[call-overload]
                found.append(Option(flag, kind, (), default, count))
    return found


def _value(option: Option, chance: random.Random) -> str:
    if option.kind == "choice":
        return chance.choice(option.choices)
    if option.kind == "bool":
        return chance.choice(("True", "False"))
    if option.kind == "int":
        near = [option.default, 2 * option.default] if isinstance(option.default, int) else []
        return str(chance.choice([0, 1, 2, 4, 8, 64, *(number for number in near if abs(number) < 10_000)]))
    if option.kind == "float":
        near = [option.default, option.default / 2] if isinstance(option.default, int | float) else []
        return str(chance.choice([0.0, 0.1, 0.5, 1.0, 2.0, *near]))
    return chance.choice(WORDS)


def draw(seed: int, known: list[Option]) -> Case:
    """The command line of a seed, without its data and folders."""
    chance = random.Random(seed)
    ranks = chance.choice((1, 1, 2, 2, 2, 3, 4, 4, 4))
    left, sizes = ranks, {}
    is_moe, packed = chance.random() < 0.5, chance.random() < 0.4
    balanced = [name for name in ("experts", "sequences", "layers") if chance.random() < 0.4]
    for name in chance.sample(("tensor", "pipeline", "context"), 3):
        may = name != "context" or (packed and "sequences" in balanced)
        sizes[name] = chance.choice([size for size in (1, 2, left) if left % size == 0]) if may else 1
        left //= sizes[name]
    ranks_of_experts = ranks // sizes["pipeline"] // sizes["tensor"]
    expert = chance.choice([size for size in (1, 2, 4) if ranks_of_experts % size == 0]) if is_moe else 1
    layers, micro = chance.choice((4, 4, 5, 8)), chance.choice((1, 1, 2))
    if layers % sizes["pipeline"]:
        layers = 4 * sizes["pipeline"]
    batch = micro * max(ranks // (sizes["tensor"] * sizes["pipeline"] * sizes["context"]), 1) * chance.choice((1, 2, 4))
    flags = [
        f"--num-layers {layers} --hidden-size {chance.choice((16, 32))} --num-attention-heads {chance.choice((2, 4))}",
        f"--micro-batch-size {micro} --global-batch-size {batch} --expert-model-parallel-size {expert}",
        *(f"--{name}-{'parallel' if name == 'context' else 'model-parallel'}-size {n}" for name, n in sizes.items()),
        "--sequence-parallel" if sizes["tensor"] > 1 and (is_moe or chance.random() < 0.5) else "",
        f"{MOE} --expert-tensor-parallel-size 1" if is_moe else "",
        f"{PACKED} --attention-dropout 0" if packed else "",
        chance.choice(("", "", "--bf16", "--fp16", "--fp64")),
    ]
    if sizes["pipeline"] > 1 and chance.random() < 0.3:
        flags.append("--num-virtual-stages-per-pipeline-rank 2")
    can = {"experts": expert > 1, "sequences": sizes["context"] > 1, "layers": sizes["pipeline"] > 1}
    if chance.random() < 0.2:
        flags.append("--balance all")
    flags += [f"--balance-{name}" for name in balanced if can[name] or chance.random() < 0.15]
    flags += chance.sample(COMMON, chance.choice((0, 1, 2, 3, 4)))
    flags += chance.sample(COMMON_MOE, chance.choice((0, 1, 2))) if is_moe else []
    for option in chance.sample(known, chance.choice((0, 0, 1, 1, 2, 3))):
        flags.append(" ".join([option.flag, *(_value(option, chance) for _ in range(option.count))]))
    return Case(seed, ranks, tuple(" ".join(flags).split()), packed)


def each(known: list[Option], ranks: int, base: str) -> Iterator[Case]:
    """Every flag alone beside those of a small job, with every value that may be drawn for it."""
    number = 0
    for option in known:
        tried = {" ".join(_value(option, random.Random(seed)) for _ in range(option.count)) for seed in range(60)}
        for value in sorted(tried):
            yield Case(number, ranks, (*base.split(), option.flag, *value.split()), PACKED in base)
            number += 1


def _rank(argv: list[str], folder: str) -> tuple[int, int]:
    """One rank of what `pretrain_gpt.py` does in an empty folder. Returns the exit code and the number of steps."""
    from megatron.training import training

    from megatron.balanced.trainer.watchdog.failure import report_failures_once

    os.chdir(folder)
    steps = []
    step = training.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        steps.append(result[0])
        return result

    train_step.__wrapped__ = step  # type: ignore[attr-defined]
    training.train_step = train_step
    code: Any = 0
    try:
        with report_failures_once():
            args, config, train = parse(argv)
            train(args, config)
    except SystemExit as end:
        code = end.code or 0
    return code if isinstance(code, int) else 1, len(steps)


class Runs:
    """Command lines on one pool and one corpus."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._documents = write_documents(folder / "documents", heavy_tailed(400, seed=1))
        self._documents[self._documents.index("100,0,0")] = "80,20,0"
        (self.known,) = pool.run(1, options)

    def argv(self, case: Case, folder: str) -> list[str]:
        data = self._documents if case.packed else MOCK_DATA
        return [*SMALL, *data, *(flag.replace("{folder}", folder) for flag in case.flags)]

    def check(self, case: Case) -> tuple[str, str]:
        """Run a command line. Returns "trained", "ended", "refused" or "failed", and what it said or what is wrong."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            try:
                done = self._pool.run(case.ranks, _rank, self.argv(case, folder), folder, timeout=SECONDS)
            except (Hang, RuntimeError) as error:
                return "failed", f"{error}"
        return judge(case, done, "\n".join(self._pool.output))


def judge(case: Case, done: list[tuple[int, int]], said: str) -> tuple[str, str]:
    """What a run came to. done: exit code and steps of each rank. said: what all ranks printed."""
    codes, steps = {code for code, _ in done}, {count for _, count in done}
    errors = [line for line in said.splitlines() if "pretrain_gpt.py:" in line]
    begin = said.find("Traceback (most recent")
    shown = said[begin:][:SHOWN] if begin >= 0 else said[-SHOWN:]
    if begin >= 0:
        return "failed", f"a traceback, exit codes {codes}: {shown}"
    if codes == {0}:
        if errors or (steps != {STEPS} and not SHORTER & set(case.flags)):
            return "failed", f"exit code 0 after {steps} steps: {shown}"
        return ("trained" if steps == {STEPS} else "ended"), ""
    if 0 in codes or len(errors) != 1:
        return "failed", f"exit codes {codes} with {len(errors)} lines of error: {shown}"
    return "refused", errors[0]


def records(runs: Runs, cases: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """A record a command line: its seed, what it came to, in seconds, and the flags."""
    for case in cases:
        begin = time.monotonic()
        outcome, said = runs.check(case)
        yield {
            "seed": case.seed,
            "outcome": outcome,
            "seconds": round(time.monotonic() - begin, 1),
            "ranks": case.ranks,
            "said": said,
            "flags": " ".join(case.flags),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; the time by default")
    parser.add_argument("--each", choices=BASES, help="instead, every flag alone beside those of a job")
    parser.add_argument("--json", type=Path, help="file to append a line a run to")
    args = parser.parse_args()
    first = int(time.time()) if args.seed is None and not args.each else args.seed or 0
    seeds = range(first, first + args.runs)
    pool, counts = Pool(), Counter[str]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(pool, Path(folder))
            cases = (
                [*each(runs.known, *BASES[args.each])][first:] if args.each else [draw(n, runs.known) for n in seeds]
            )
            print(f"{len(cases)} runs from --seed {first}")
            for record in records(runs, cases):
                counts[record["outcome"]] += 1
                shown = record["said"] if record["outcome"] == "failed" else record["said"][:100]
                print(f"{record['seed']:6d} {record['seconds']:6.1f} s  {record['outcome']}  {shown}")
                if record["outcome"] == "failed":
                    print(f"       {record['ranks']} rank(s): {record['flags']}")
                    if not args.each:
                        print(f"       again: --fuzz 1 --seed {record['seed']}")
                sys.stdout.flush()
                if args.json:
                    with args.json.open("a") as lines:
                        lines.write(json.dumps(record) + "\n")
    finally:
        with contextlib.suppress(Exception):  # what is on its way counts
            pool.stop()
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    from tests.support.fuzz import main as run  # by its name, by which ranks find what they are to call

    sys.exit(run())
