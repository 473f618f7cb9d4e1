"""Ranks of `benchmarks.together`: real training by `megatron.balanced.trainer.train`, with paced computation.

This process imports Megatron-LM once and forks every rank of every run, since sixteen imports take minutes of two
cores. A rank enters its place in the emulated cluster and trains: Megatron-LM's trainer, schedule, dispatcher and
optimizer, the balancers, their messages and moves are real. What takes time is replaced:

- linear parts of a layer, and experts, wait (`benchmarks.emulated.device`): experts for their tokens, twice that in the
  backward pass;
- attention occupies the device for its query-key pairs (`benchmarks.sequences.emulated_rank.ZeroScores`);
- routers return the workload's assignments, and micro-batches have the workload's documents;
- without balanced sequences, Megatron-LM's scheduler spreads documents (`benchmarks.baselines.sequences`).
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.emulated import EmulatedCluster
from benchmarks.emulated.entry import die_with_parent, enter_node
from benchmarks.replaced import replace_name
from benchmarks.together.workload import FLAGS, TOP_K, Pace, Variant, Work, lengths_of, pairs_of, routed

__all__ = ["prepare", "train"]

_PATIENCE = 600.0  # seconds of a run
_QUICK = 0.1  # of the seconds of a quick step
_IMPORTED = (
    "megatron.training.training", "megatron.balanced.trainer.train", "megatron.balanced.trainer.arguments",
    "megatron.core.models.mimo", "megatron.core.tokenizers.text.libraries.null_tokenizer", "torch.utils.tensorboard",
    "examples.dynamic_models.callbacks", "examples.dynamic_models.extension", "examples.dynamic_models.freezing",
    "benchmarks.baselines.sequences", "benchmarks.experts.emulated_rank", "benchmarks.sequences.emulated_rank",
    "rich.console", "rich.progress",
)  # fmt: skip
REPLACED = {"choose_kernel", "routing", "document_lengths", "plan_sequences"}


def prepare() -> None:
    """Import what ranks need, without threads, so that they can be forks."""
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    torch.set_num_threads(1)
    import importlib

    for name in _IMPORTED:
        importlib.import_module(name)


def train(
    cluster: EmulatedCluster,
    variant: Variant,
    folder: Path,
    *,
    steps: int,
    micro_batches: int,
    seconds: float,
    quick: Collection[int] = (),
    report: bool = False,
    on_step: Callable[[float], None] = lambda seconds: None,
) -> list[float]:
    """Seconds of each step of a new run.

    folder: for its logs, its steps and its report.
    steps, micro_batches: of the run, and of a step and pipeline.
    seconds: of `Pace`.
    quick: steps, from 0, that take a tenth of it: those that only warm up.
    report: whether it writes one, which holds what the figures of a pipeline need.
    on_step: called with each of them as it comes.

    Raises SystemExit where a rank fails or the ranks do not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *variant.flags, "--exit-interval", str(steps), "--global-batch-size", str(micro_batches)]
    flags += ["--balance-report", str(folder / "report")] if report else []
    children = {}
    for rank, place in enumerate(cluster.places()):
        child = os.fork()
        if not child:
            _be_rank(rank, place, flags, folder, Pace(seconds, variant.even, variant.hybrid), quick)
        children[child] = rank
    return _wait(children, folder, on_step)


def _wait(children: dict[int, int], folder: Path, on_step: Callable[[float], None]) -> list[float]:
    """Wait for all, telling of steps. children: rank by process."""
    end, told = time.monotonic() + _PATIENCE, 0
    failed: tuple[int, str] | None = None
    try:
        while children and failed is None:
            for child in list(children):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended and (status := os.waitstatus_to_exitcode(status)):
                    failed = children[child], f"ended with {status}"
                if ended:
                    del children[child]
            if time.monotonic() > end:
                failed = min(children.values()), f"had not ended after {_PATIENCE:g} s"
            found = _steps(folder)
            for each in found[told:]:
                on_step(each)
            told = len(found)
            time.sleep(0.1)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if failed is not None:
        rank, how = failed
        tail = (folder / f"rank_{rank:02}.log").read_text().splitlines()[-20:]
        raise SystemExit("\n".join([*tail, f"together: rank {rank} {how}; its log is in {folder}"]))
    return _steps(folder)


def _steps(folder: Path) -> list[float]:
    path = folder / "steps.txt"
    return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _be_rank(
    rank: int,
    place: tuple[dict[str, str], dict[str, Any]],
    flags: list[str],
    folder: Path,
    pace: Pace,
    quick: Collection[int],
) -> None:
    """Train, and end the process. place: as of `EmulatedCluster.places`."""
    environment, node = place
    code = 1
    try:
        die_with_parent(node["parent"])
        log = os.open(folder / f"rank_{rank:02}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= environment | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if node["namespace"] is not None:
            enter_node(node["namespace"], node["hostname"], node["hosts"])
        _train(flags, folder / "steps.txt" if rank == 0 else None, pace, quick)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if ended.code and code:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Wait(torch.autograd.Function):
    """The identity, which occupies the device for `seconds`, twice that in its backward pass."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, work: Work, seconds: float) -> torch.Tensor:
        ctx.work, ctx.seconds = work, seconds
        work.run(seconds)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.work.run(2 * ctx.seconds)
        return gradients[0], None, None


def _train(flags: Sequence[str], steps: Path | None, pace: Pace, quick: Collection[int]) -> None:
    from examples.dynamic_models.extension import DynamicModel
    from megatron.balanced.trainer.arguments import parse_arguments

    model = DynamicModel()
    args, config = parse_arguments(list(flags), extension=model)

    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trainer.train import train as run

    class Clock(StepCallback):
        """Writes the seconds from the beginning of one step to that of the next, and tells routers the iteration of the
        record. Each quick step begins the record again, so that the steps that count route alike in all runs."""

        began: float | None = None

        def begin_step(self, iteration: int, config: Any) -> None:
            now = time.perf_counter()
            if self.began is not None and steps is not None:
                with steps.open("a") as file:
                    file.write(f"{now - self.began:.4f}\n")
            self.began = now
            warms_up = next(number) in quick
            record[0] = 0 if warms_up else record[0] + 1
            work.begin(_QUICK if warms_up else 1.0)

        def end_training(self) -> None:
            self.begin_step(0, None)

    number, record, work = count(), [-1], Work()
    called = _pace(pace, record, work)
    try:
        run(args, config, [Clock()], extension=model)
    except SystemExit as ended:  # at --exit-interval
        if ended.code:
            raise
    if missing := sorted(REPLACED - called):
        raise SystemExit(f"together: nothing called {', '.join(missing)}, so this was another workload")


def _pace(pace: Pace, record: list[int], work: Work) -> set[str]:
    """Replace what takes time in the layers of this process, and what is uneven.

    record: holds the recorded iteration whose routing the present step has.
    work: what this process waits by.

    Returns a set to which each of REPLACED is added when it is called.
    """
    from megatron.core import mpu
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from balancing.kernels.choice import Choice
    from benchmarks.baselines import sequences as baselines
    from benchmarks.experts.emulated_rank import routing_map
    from benchmarks.sequences import emulated_rank
    from megatron.balanced.sequences import dataset, planner, tokens

    replace_name(emulated_rank, "tile_pairs", pairs_of)

    class Kernel(emulated_rank.ZeroScores):
        def _occupy(self, begin: float, pairs: float) -> None:
            work.run(pairs * pace.pair)

    kernel = Kernel(work, pace.pair)

    layer_forward = TransformerLayer.forward

    def layer(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden_states = _Wait.apply(hidden_states, work, pace.linear)
        return layer_forward(self, hidden_states, *args, **kwargs)

    replace_name(TransformerLayer, "forward", layer)
    # With replicas, runs these as well.
    replace_name(SequentialMLP, "forward", _paced_experts(SequentialMLP.forward, work, pace.token))

    maps: dict[tuple[int, int, int], torch.Tensor] = {}

    def routing(self: Any, logits: torch.Tensor, *unused: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = logits.numel() // logits.shape[-1]
        key = self.layer_number, tokens, record[0]
        if key not in maps:
            rank = mpu.get_expert_model_parallel_rank()
            maps[key] = routing_map(routed(rank, self.layer_number - 1, tokens, pace.even, record[0]), TOP_K)
        chosen = maps[key]
        return (logits.reshape(tokens, -1) * 0 + 1 / TOP_K) * chosen, chosen

    def documents(dataset: Any, index: int) -> list[int]:
        # Every micro-batch has the same documents, in another order.
        return [int(length) for length in np.random.default_rng(index).permutation(lengths_of(pace.even))]

    def planned(lengths: Sequence[int], cluster: Any, **options: Any) -> Any:
        return baselines.plan_sequences(lengths, cluster, **options | ({"method": "hybrid"} if pace.hybrid else {}))

    # A name that is used no more could be replaced as well, and nothing would tell.
    called: set[str] = set()
    for owner, name, replacement in (
        (tokens, "choose_kernel", lambda *unused, **also_unused: Choice(kernel, "emulated", "", {})),
        (router.TopKRouter, "routing", routing),
        (dataset, "document_lengths", documents),
        (planner, "plan_sequences", planned),
    ):
        replace_name(owner, name, replacement)
        replace_name(owner, name, _noted(replacement, name, called))
    return called


def _noted(function: Callable, name: str, called: set[str]) -> Callable:
    """`function`, which adds `name` to `called`."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.add(name)
        return function(*args, **kwargs)

    return noted


def _paced_experts(forward: Callable, work: Work, seconds: float) -> Callable:
    """`forward` of local experts, which takes `seconds` for each token."""

    def paced(self: Any, permuted_local_hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = permuted_local_hidden_states
        return forward(self, _Wait.apply(given, work, seconds * len(given)), *args, **kwargs)

    return paced
