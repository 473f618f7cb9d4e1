"""The bad cases on emulated ranks.

Four processes step together over gloo. Trials (`megatron.balanced.trials.step_trials`), plans of replicas and of
sequences, and messages between hosts are real. A rank's compute and its transfers are timed waits: seconds by the
tokens and query-key pairs that the plan, or Megatron-LM's layout, gives it. A balancer that is off in a step costs
nothing there.
Steps far from a round of trials take no time.
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from balancing.clock import pace
from balancing.cluster import Cluster
from balancing.experts import plan_replicas, traffic
from balancing.sequences import AttentionShape, causal_area, plan_sequences
from balancing.trials import TrialConfig
from benchmarks.emulated import EmulatedCluster
from benchmarks.trials.cases import CASES, Case, Watch

__all__ = ["RANKS", "Work", "run_cases"]

RANKS, _EXPERTS, _SLOTS, _TOKENS = 4, 16, 2, 4096
_SECONDS = 0.05  # of a rank's experts, and of its attention, when ranks are even
_CHEAP, _DEAR = 0.05, 0.3  # seconds of a balanced step's transfers over those of a rank's even compute
_NOISE = 0.1  # deviation of the logarithm of a noisy rank's seconds
_NEAR = 60  # steps from the one that is a multiple of the interval of rounds, which take time
_SHAPE = AttentionShape(1024, 8, 8, 4, 4096)
_EVEN_LOAD = np.full((RANKS, _EXPERTS), _TOKENS // _EXPERTS)
_LOADS = {"even": _EVEN_LOAD, "uneven": (_EVEN_LOAD * np.array([3, *[1] * 4, *[0.8] * 11])).astype(int)}
_DOCUMENTS = {"even": ((64,) * 64,) * RANKS, "uneven": ((4096,), (2048,) * 2, (256,) * 16, (64,) * 64)}


class Work:
    """Seconds of a rank in a step."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank
        self._cluster = Cluster.preset("h100-8x400g").relabel(1, RANKS)
        self._known: dict[tuple[str, str], tuple[float, float]] = {}
        self._random = np.random.default_rng(rank)

    def of(self, iteration: int, left_out: frozenset[str]) -> float:
        case, seconds = self._case, 0.0
        if (loads := case.loads_at(iteration)) is not None:
            seconds += self._seconds("experts", loads, "experts" in left_out)
        if case.documents is not None:
            seconds += self._seconds("sequences", case.documents, "sequences" in left_out)
        if iteration % TrialConfig().interval >= _NEAR:
            return 0.0
        noise = _NOISE if case.noisy and self._rank == 1 else 0.0
        seconds *= np.exp(noise * self._random.normal())
        return seconds * (10 if iteration == case.slow else 1)

    def _seconds(self, name: str, kind: str, left_out: bool) -> float:
        if (name, kind) not in self._known:
            found = self._experts(_LOADS[kind]) if name == "experts" else self._sequences(_DOCUMENTS[kind])
            self._known[name, kind] = found
        plain, balanced = self._known[name, kind]
        transfers = (_DEAR if name in self._case.dear else _CHEAP) * self._case.slow_links
        return plain if left_out else balanced + transfers * _SECONDS

    def _experts(self, load: np.ndarray) -> tuple[float, float]:
        """Without replicas and with them."""
        found = []
        for method in ("none", "quota"):
            placement = plan_replicas(load, self._cluster, slots=_SLOTS, method=method)
            found.append(float(traffic(load, placement).sum(0)[self._rank]) / _TOKENS * _SECONDS)
        return found[0], found[1]

    def _sequences(self, documents: Sequence[Sequence[int]]) -> tuple[float, float]:
        """As drawn and as planned."""
        drawn = np.array([causal_area(of_rank) for of_rank in documents])
        lengths = [length for of_rank in documents for length in of_rank]
        planned = plan_sequences(lengths, self._cluster, shape=_SHAPE).area
        of_rank, mean = self._rank, drawn.mean() / _SECONDS
        return float(drawn[of_rank] / mean), float(planned[of_rank] / mean)


def _rank(case: Case) -> dict[str, Any]:
    """Run a case on this rank. Returns its row of the table."""
    import torch
    import torch.distributed as dist

    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    from megatron.balanced.run import Run
    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trials.step_trials import StepTrials

    run = Run()
    for name in case.expected:
        run.add(balancer := StepCallback())
        balancer.name = name
    trials = StepTrials(run, TrialConfig(), steps=case.steps)
    watch, work, ready = Watch(case, case.steps, TrialConfig()), Work(case, dist.get_rank()), torch.zeros(1)
    for iteration in range(case.steps):
        trials.begin_step(iteration, None)
        begin = time.perf_counter()
        pace(work.of(iteration, run.left_out))
        dist.all_reduce(ready)  # as gradients, which all ranks wait for
        watch.add(time.perf_counter() - begin, run.left_out)
        trials.end_step()
    trials.end_training()
    return watch.row(trials.gains)


def _run_as_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for case in CASES:
        found = _rank(case)
        if dist.get_rank() == 0:
            print(f"row {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


def run_cases(show: Callable[[dict[str, Any]], None]) -> None:
    """Run all cases. show: told each row of the table."""

    def on_line(rank: int, line: str) -> None:
        if line.startswith("row "):
            show(json.loads(line.removeprefix("row ")))

    with EmulatedCluster(1, RANKS) as cluster:
        cluster.run("-m", ["benchmarks.trials.emulated"], timeout=900, on_line=on_line)


if __name__ == "__main__":
    _run_as_rank()
