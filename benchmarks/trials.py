"""What trials by the clock decide in bad cases, on emulated ranks, and what they cost.

    python -m benchmarks.trials [--json FILE]

Four processes step together over gloo. Trials (`megatron.balanced.observe.trials`), plans of replicas and of sequences,
and messages between hosts are real. A rank's compute and its transfers are timed waits: seconds by the tokens and
query-key pairs that the plan, or Megatron-LM's layout, gives it. A balancer that is off in a step costs nothing there.
Steps far from a round of trials take no time.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from balancing.clock import pace
from balancing.cluster import Cluster
from balancing.experts import plan_replicas, traffic
from balancing.files import write_text
from balancing.sequences import AttentionShape, causal_area, plan_sequences
from balancing.trials import TrialConfig
from benchmarks.emulated import EmulatedCluster

__all__ = ["CASES", "RANKS", "Case", "Work"]

RANKS, _EXPERTS, _SLOTS, _TOKENS = 4, 16, 2, 4096
_SECONDS = 0.05  # of a rank's experts, and of its attention, when ranks are even
_NEAR = 60  # steps from the one that is a multiple of the interval of rounds, which take time
_SHAPE = AttentionShape(1024, 8, 8, 4, 4096)
_EVEN_LOAD = np.full((RANKS, _EXPERTS), _TOKENS // _EXPERTS)
_UNEVEN_LOAD = _EVEN_LOAD * np.array([3, *[1] * 4, *[0.8] * 11])
_EVEN_DOCUMENTS = ((64,) * 64,) * RANKS
_UNEVEN_DOCUMENTS = ((4096,), (2048,) * 2, (256,) * 16, (64,) * 64)


@dataclass(frozen=True)
class Case:
    """A job.

    what: in words.
    steps: of the job.
    load: iteration -> tokens [source_rank, expert]; None without balanced experts.
    documents: tokens of the documents of each data-parallel rank; None without balanced sequences.
    transfer: seconds of transfers of a balanced step over those of a rank's even compute.
    noise: rank -> deviation of the logarithm of its seconds.
    slow: iteration that takes ten times as long.
    expected: balancer -> whether it is on at the end.
    """

    what: str
    steps: int
    load: Callable[[int], np.ndarray] | None = None
    documents: Sequence[Sequence[int]] | None = None
    transfer: dict[str, float] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    slow: int | None = None
    expected: dict[str, bool] = field(default_factory=dict)


def _even(iteration: int) -> np.ndarray:
    return _EVEN_LOAD


def _uneven(iteration: int) -> np.ndarray:
    return _UNEVEN_LOAD.astype(int)


def _even_later(iteration: int) -> np.ndarray:
    return _uneven(iteration) if iteration < 200 else _EVEN_LOAD


_CHEAP, _DEAR = 0.05, 0.3
CASES = (
    Case("even loads, dear transfers", 700, _even, transfer={"experts": _DEAR}, expected={"experts": False}),
    Case("uneven loads", 700, _uneven, transfer={"experts": _CHEAP}, expected={"experts": True}),
    Case("even after 200 steps", 2200, _even_later, transfer={"experts": _DEAR}, expected={"experts": False}),
    Case("uneven loads, one noisy rank", 700, _uneven, transfer={"experts": _CHEAP}, noise={1: 0.1},
         expected={"experts": True}),
    Case("uneven loads, one step ten times as long", 700, _uneven, transfer={"experts": _CHEAP}, slow=27,
         expected={"experts": True}),
    Case("uneven loads, even documents", 2200, _uneven, _EVEN_DOCUMENTS,
         transfer={"experts": _CHEAP, "sequences": _DEAR}, expected={"experts": True, "sequences": False}),
    Case("even loads, uneven documents", 2200, _even, _UNEVEN_DOCUMENTS,
         transfer={"experts": _DEAR, "sequences": _CHEAP}, expected={"experts": False, "sequences": True}),
    Case("even loads, dear transfers, 20 steps", 20, _even, transfer={"experts": _DEAR}, expected={"experts": True}),
)  # fmt: skip


class Work:
    """Seconds of a rank in a step."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank = case, rank
        self._cluster = Cluster.preset("h100-8x400g").relabel(1, RANKS)
        self._known: dict[tuple[str, bytes], tuple[float, float]] = {}
        self._random = np.random.default_rng(rank)

    def of(self, iteration: int, left_out: frozenset[str]) -> float:
        case, seconds = self._case, 0.0
        if case.load is not None:
            seconds += self._seconds("experts", case.load(iteration), "experts" in left_out)
        if case.documents is not None:
            seconds += self._seconds("sequences", case.documents, "sequences" in left_out)
        if iteration % TrialConfig().interval >= _NEAR:
            return 0.0
        seconds *= np.exp(case.noise.get(self._rank, 0.0) * self._random.normal())
        return seconds * (10 if iteration == case.slow else 1)

    def _seconds(self, name: str, work: Any, left_out: bool) -> float:
        key = name, repr(work).encode() if name == "sequences" else work.tobytes()
        if key not in self._known:
            self._known[key] = self._experts(work) if name == "experts" else self._sequences(work)
        plain, balanced = self._known[key]
        return plain if left_out else balanced + self._case.transfer[name] * _SECONDS

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
    """Run a case on this rank. Returns what rank 0 says of it."""
    import torch
    import torch.distributed as dist

    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    from megatron.balanced.observe.trials import StepTrials
    from megatron.balanced.shared.callbacks import StepCallback

    balancers = []
    for name in case.expected:
        balancer = StepCallback()
        balancer.trial_name = name
        balancers.append(balancer)
    odd: list[int] = []
    trials = StepTrials(balancers, TrialConfig(), steps=case.steps, set_aside=lambda: odd.append(len(took)))
    work, ready = Work(case, dist.get_rank()), torch.zeros(1)
    took: list[float] = []
    left_outs: list[frozenset[str]] = []
    for iteration in range(case.steps):
        trials.begin_step(iteration, None)
        begin = time.perf_counter()
        left_outs.append(frozenset(str(one.trial_name) for one in balancers if one.left_out))
        pace(work.of(iteration, left_outs[-1]))
        dist.all_reduce(ready)  # as gradients, which all ranks wait for
        trials.end_step()
        took.append(time.perf_counter() - begin)
    trials.end_training()
    on = {name: name not in left_outs[-1] for name in case.expected}
    decided = [(at, left_out) for at, left_out in enumerate(left_outs) if at not in odd]
    off_since = {name: 1 + max((at for at, left_out in decided if name not in left_out), default=-1) for name in on}
    gains = {name: str(gain) for name, gain in trials.gains.items()}
    return {"case": case.what, "steps": case.steps, "on": on, "off_since": off_since, "gains": gains,
            "cost": _cost(took, odd)}  # fmt: skip


def _cost(took: Sequence[float], odd: Sequence[int]) -> float:
    """Seconds by which steps that ran otherwise than decided were longer, as a share of the job. odd: these steps."""
    interval, extra, usual = TrialConfig().interval, 0.0, 0.0
    for begin in range(0, len(took), interval):
        within = [at for at in odd if begin <= at < begin + interval]
        if within:
            others = [took[at] for at in range(begin, within[-1] + 1) if at not in within]
            usual = float(np.median(others))
            extra += sum(took[at] - usual for at in within)
    return extra / (usual * len(took)) if usual else 0.0


def _run_as_rank() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for case in CASES:
        found = _rank(case)
        if dist.get_rank() == 0:
            print(f"row {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _run_as_rank()
        return
    with EmulatedCluster(1, RANKS) as cluster:
        run = cluster.run("-m", ["benchmarks.trials"], timeout=900)
    rows = [json.loads(line.removeprefix("row ")) for line in run.output[0] if line.startswith("row ")]
    print(f"{'case':<42} {'steps':>5}  {'on at the end':<32} {'cost':>6}  gains by the clock")
    for row in rows:
        on = ", ".join(
            f"{name} {'on' if is_on else 'off since ' + str(row['off_since'][name])}"
            for name, is_on in row["on"].items()
        )
        gains = ", ".join(f"{name} {gain}" for name, gain in row["gains"].items())
        print(f"{row['case']:<42} {row['steps']:>5}  {on:<32} {row['cost']:>6.2%}  {gains}")
    if options.json:
        write_text(options.json, json.dumps(rows, indent=1) + "\n")
    wrong = [row["case"] for row, case in zip(rows, CASES, strict=True) if row["on"] != case.expected]
    if wrong:
        sys.exit(f"wrong decisions: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
