"""Gains by the clock on one GPU: four ranks, each on a quarter of it, train without and with a balancer.

MPS gives each process a share of the GPU (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), so ranks compute side by side as on four
smaller GPUs. With NCCL below 2.30 messages go through sockets on one host and are much slower than between GPUs, so a
gain is what is left of it here; `NCCL_LIBRARY=FILE scripts/gpu_check.sh` uses a newer one, whose ranks talk on the GPU.
If there is no gain because messages take the step, the figure says so. On the CPU device the same runs are made, small,
and their times mean nothing."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.training import EXPERTS, MOCK_DATA, Orders, Told, base, losses, run
from tests.gpu.trial import Trial
from tests.support.corpus import END_OF_DOCUMENT
from tests.support.settings import settings

RANKS = 4
QUARTER = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
SKEW = 2.7
_WARM = 3  # iterations that are not counted
_CHANGE, _INTERVAL, _AFTER = 4, 4, 6  # steps before layers freeze, between decisions about layers, and after the move
_STEPS = 8
_TRIAL = 20  # steps of a job's own trials
_SHAPE = {
    "cpu": "",
    "cuda": "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048",
}


def _has_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def _base(trial: Trial, data: str = "") -> list[str]:
    """The flags that all runs of a part share."""
    data = data or (MOCK_DATA if trial.device == "cpu" else MOCK_DATA.replace("127", "32000"))
    layers = {}
    if trial.device == "cuda" and trial.run(1, _has_engine)[0]:
        layers = {"layers": "--transformer-impl transformer_engine"}
    argv = base(trial.device, "bf16", data, **layers)
    return [*argv, *_SHAPE[trial.device].split()]


def _clocked(trial: Trial, argv: list[str], what: str, skew: float = 0.0) -> list[float]:
    """Seconds of each step, of the slowest rank."""
    told = run(trial, RANKS, argv, Orders(clock=True, drawn=False, skew=skew), what=what, environment=QUARTER)
    assert np.isfinite(losses(told)).all()
    times = _steps(told)
    trial.detail(f"{what}: seconds of each step {' '.join(f'{seconds:.3f}' for seconds in times)}")
    return times


def _steps(told: list[Told]) -> list[float]:
    return [max(of_ranks) for of_ranks in zip(*(rank.seconds for rank in told), strict=True)]


def _events(folder: Path, balancer: str) -> list[dict[str, Any]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["balancer"] == balancer]


def layers(trial: Trial) -> None:
    """Four stages of equal layers, and the same with a front that freezes; then layers move by what they are measured
    to cost. Steps before and after the move are of the same run."""
    count, frozen = (16, 7) if trial.device == "cuda" else (8, 3)
    steps = _CHANGE + _INTERVAL + _AFTER
    argv = [
        *_base(trial),
        *f"--num-layers {count} --pipeline-model-parallel-size {RANKS} --untie-embeddings-and-output-weights".split(),
        *f"--global-batch-size {16 if trial.device == 'cuda' else 4}".split(),
        # More steps than are run, so that a move has time to pay.
        *f"--train-iters 1000 --exit-interval {steps} --balance-layers --layer-balance-interval {_INTERVAL}".split(),
    ]
    cases = {"dense": "", "frozen front": f"--freeze-layers {frozen} --freeze-layers-start {_CHANGE}"}
    for name, flags in cases.items():
        report = trial.folder / name.replace(" ", "-")
        times = _clocked(trial, [*argv, *flags.split(), "--balance-report", str(report)], name)
        assert len(times) == steps
        phases = times[1:_CHANGE], times[_CHANGE + 1 : _CHANGE + _INTERVAL], times[-_AFTER + 1 :]
        before, changed, moved = map(statistics.median, phases)
        moves = [event for event in _events(report, "layers") if event["action"] == "move"]
        layouts = " then ".join(str(event["layout_after"]) for event in moves) or "the gate saw nothing to gain"
        trial.figure(
            f"{name}: {before:.2f} s a step, {changed:.2f} before the move, {moved:.2f} after it, "
            f"{changed / moved:.2f} times as fast; {layouts}"
        )


def _experts(trial: Trial) -> list[str]:
    """The command line of four expert-parallel ranks whose experts are most of a step."""
    shape = "--num-layers 4"
    if trial.device == "cuda":  # with smaller experts messages take the step; with larger ones an H100 is too small
        shape = "--num-layers 2 --moe-ffn-hidden-size 24576 --micro-batch-size 2 --global-batch-size 32"
    experts = EXPERTS.replace("--moe-router-topk 2", "--moe-router-topk 1 --moe-router-pre-softmax")
    experts = experts.replace("--expert-model-parallel-size 2", f"--expert-model-parallel-size {RANKS}")
    return [*_base(trial), *f"{experts} {shape} --moe-router-load-balancing-type none".split()]


def experts(trial: Trial) -> None:
    """Routing that sends the first of four expert-parallel ranks 2.7 times the mean: without replicas, with them as the
    gate decides by default and wherever they balance tokens (`min_gain: 0`), and the same with even routing, which is
    the limit."""
    argv = [*_experts(trial), "--train-iters", str(_STEPS)]
    always = settings("experts", min_gain=0)
    kinds = {"uneven": ("", SKEW), "by the gate": ("--balance-experts", SKEW)}
    kinds |= {"with replicas": (f"--balance-experts {always}", SKEW), "even": ("", 1.0)}
    took = {}
    for name, (flags, skew) in kinds.items():
        report = f"--balance-report {trial.folder / name.replace(' ', '-')}" if flags else ""
        own = [*argv, *f"{flags} {report}".split()]
        took[name] = statistics.median(_clocked(trial, own, name, skew)[_WARM:])
    events = {
        name: [
            event for event in _events(trial.folder / name.replace(" ", "-"), "experts") if "imbalance_before" in event
        ]
        for name in ("by the gate", "with replicas")
    }
    replicated = [event for event in events["with replicas"] if event["action"] == "replicate"]
    assert replicated, "nothing was replicated"
    loads = [statistics.median(event[f"imbalance_{when}"] for event in replicated) for when in ("before", "after")]
    assert abs(loads[0] / SKEW - 1) < 0.2 and loads[1] < 1.2, f"busiest rank over the mean, before and after: {loads}"
    trial.figure("busiest rank over the mean {:.2f}, with replicas {:.2f}".format(*loads))
    gate = sum(event["action"] == "replicate" for event in events["by the gate"])
    trial.figure(f"the gate replicated in {gate} of {len(events['by the gate'])} decisions")
    limit = took["uneven"] / took["even"]
    _gain(trial, {name: took[name] for name in ("uneven", "by the gate")}, "by the gate", "uneven", limit)
    _gain(trial, took, "with replicas", "uneven", limit)


def trial(trial: Trial) -> None:
    """A job as a user would ask it: `--balance-trial` runs steps with and without replicas in turn, and says what they
    gain by the clock. Routing is uneven as in `experts`."""
    report = trial.folder / "report"
    argv = [*_experts(trial), *f"--train-iters 1000 --balance-experts --balance-report {report}".split()]
    _clocked(trial, [*argv, "--balance-trial", str(_TRIAL)], "trial", SKEW)
    (found,) = (event for event in _events(report, "experts") if event["action"] == "trial")
    assert 0 < found["gain_low"] <= found["gain"] <= found["gain_high"]
    where = "{gain:.2f} times as fast by the clock, {gain_low:.2f} to {gain_high:.2f} in {pairs} pairs".format(**found)
    trial.figure(f"replicas: {where}")


def sequences(trial: Trial) -> None:
    """Documents of very different length over four context-parallel ranks: a ring over all of them, an all-gather, and
    the balanced plan."""
    longest = 16384 if trial.device == "cuda" else 32
    draw = np.random.default_rng(1)
    lengths = np.minimum(draw.lognormal(np.log(longest / 16), 1.5, 200).astype(int) + 2, longest - 1)
    documents = [np.append(draw.integers(0, END_OF_DOCUMENT, length), END_OF_DOCUMENT) for length in lengths]
    argv = _base(trial, trial.write_documents(documents))
    argv += f"--context-parallel-size {RANKS} --dataloader-inter-document-masking --train-iters {_STEPS}".split()
    argv += f"--seq-length {longest} --max-position-embeddings {longest} --balance-sequences".split()
    if trial.device == "cuda":  # a quarter of the keys, for messages go through sockets
        argv += "--group-query-attention --num-query-groups 4".split()
    took = {}
    for planner in ("ring", "gather", "chunks"):
        flags = settings("sequences", planner=planner).split()
        took[planner] = statistics.median(_clocked(trial, [*argv, *flags], planner)[_WARM:])
    _gain(trial, took, "chunks", "ring")


def _gain(trial: Trial, took: dict[str, float], balanced: str, baseline: str, limit: float = 0.0) -> None:
    seconds = ", ".join(f"{name} {each:.2f} s a step" for name, each in took.items())
    gain = took[baseline] / took[balanced]
    trial.figure(f"{seconds}: {gain:.2f} times as fast" + f", limit {limit:.2f}" * bool(limit))
    if trial.device == "cuda" and max(limit, gain) < 1.05:
        trial.figure("messages over sockets and what is not balanced leave nothing to see")
