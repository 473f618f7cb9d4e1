"""Stages of hybrid models: what a plan gains over equal numbers of layers, and over Megatron-LM's own segments.

    python -m benchmarks.layers.hybrid [--emulated] [--json FILE]

Patterns and sizes are published (sources in `MODELS`). Layers cost what `balancing_tools.whatif` counts on H100:
attention, MLP, MoE and Mamba layers by their shapes, and the head. Steps are simulated with Megatron's own 1F1B
schedule. Without segments Megatron-LM gives each stage the same number of layers; its functional tests have segments
(|), which are equal, too. "whole layers" is a bound: the slowest stage of the best plan, without warm-up and cool-down.
"pays after" is the number of steps after which a move has paid off, at 50 GB/s and 0.25 s for new buffers.

With --emulated the pipelines also run by the clock, over gloo with stages as timed waits. Nothing is trained; takes
seconds, with --emulated a minute on two idle cores. Exit code 1 if an emulated step is more than 5 % off the simulated.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.layers import LayerSeconds, Pipeline, StagePlan, migration_seconds, plan_pipeline, plan_stages
from balancing_tools.whatif import read_flags
from balancing_tools.whatif.step import StepModel
from benchmarks.command import parser, write_rows

__all__ = ["CASES", "MODELS", "Case", "Row", "command_line", "main", "rows"]

_COMMON = "--micro-batch-size 1 --untie-embeddings-and-output-weights --use-distributed-optimizer --overlap-grad-reduce"
# Name -> flags: Megatron-LM, examples/post_training/modelopt/conf/nvidia/NAME.sh at commits 18bb514b, 0ad941eb and
# 1296a819, with the vocabulary of the published model, and tests/functional_tests/test_cases/hybrid/
# hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G at 16d85528.
MODELS = {
    "nemotron-3-nano": (
        "--hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --hidden-size 2688 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128 --mamba-num-heads 64 "
        "--ffn-hidden-size 1856 --num-experts 128 --moe-router-topk 6 --moe-shared-expert-intermediate-size 3712 "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --vocab-size 131072"
    ),
    "nemotron-3-super": (
        "--hybrid-layer-pattern "
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME "
        "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128 "
        "--mamba-num-heads 128 --ffn-hidden-size 2688 --num-experts 512 --moe-router-topk 22 --moe-latent-size 1024 "
        "--moe-shared-expert-intermediate-size 5376 --expert-model-parallel-size 8 "
        "--moe-token-dispatcher-type alltoall --vocab-size 131072"
    ),
    "nemotron-h-8b": (
        "--hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --hidden-size 4096 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --mamba-num-heads 128 "
        "--ffn-hidden-size 21504 --vocab-size 131072"
    ),
    "functional test": (
        "--hybrid-layer-pattern M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M- --hidden-size 1024 "
        "--num-attention-heads 16 --group-query-attention --num-query-groups 8 --vocab-size 50257"
    ),
}
_GPUS, _MICRO_BATCHES, _BANDWIDTH, _REBUILD = 64, 32, 50e9, 0.25
_STEP, _BOUND = 4.0, 0.05  # seconds of an emulated step, and how far it may be off


@dataclass(frozen=True)
class Case:
    """A model of `MODELS` on a pipeline of `stages`, with samples of `seq_length` tokens."""

    model: str
    stages: int
    seq_length: int

    @property
    def name(self) -> str:
        return f"{self.model}, PP {self.stages}, {self.seq_length // 1024}k"


CASES = (
    Case("nemotron-3-nano", 2, 8192),
    Case("nemotron-3-nano", 4, 8192),
    Case("nemotron-3-nano", 4, 32768),
    Case("nemotron-3-super", 4, 8192),
    Case("nemotron-3-super", 8, 8192),
    Case("nemotron-h-8b", 2, 8192),
    Case("nemotron-h-8b", 4, 8192),
    Case("functional test", 4, 4096),
)


@dataclass(frozen=True)
class Row:
    """One case.

    costs: kind of layer -> seconds of one micro-batch, forward and backward; of the head, too.
    before, after: the pattern with equal segments, or Megatron-LM's own, and with those of the plan.
    seconds: simulated, of a step: before, after, and of the bound of whole layers.
    pays_after: steps until a move from one to the other is paid for.
    measured: of emulated steps before and after, over the simulated ones; empty if not emulated.
    gain: before over after, emulated if that ran.
    """

    case: str
    costs: dict[str, float]
    before: str
    after: str
    seconds: tuple[float, float, float]
    pays_after: int
    measured: tuple[float, ...] = ()

    @property
    def gain(self) -> float:
        ratio = self.measured[0] / self.measured[1] if self.measured else 1.0
        return self.seconds[0] / self.seconds[1] * ratio

    @property
    def within(self) -> bool:
        return all(abs(ratio - 1) <= _BOUND for ratio in self.measured)

    def lines(self) -> list[str]:
        """As text."""
        costs = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in self.costs.items())
        before, after, bound = self.seconds
        emulated = "".join(f", {ratio:.3f}" for ratio in self.measured)
        return [
            f"{self.case}: milliseconds of a layer: {costs}",
            f"  before {self.before}",
            f"  after  {self.after}",
            f"  {before:.2f} s before, {after:.2f} s after: {self.gain:.3f} times as fast; {bound / before:.0%} and "
            f"{bound / after:.0%} of the bound of whole layers; pays after {self.pays_after} steps"
            + (f"; emulated over simulated{emulated[1:]}" if emulated else ""),
        ]


def command_line(model: str, stages: int, seq_length: int) -> str:
    """The flags of a job of `_GPUS` GPUs. model: flags, of `MODELS`."""
    batch = _MICRO_BATCHES * _GPUS // stages
    return (
        f"{model} {_COMMON} --pipeline-model-parallel-size {stages} --seq-length {seq_length} "
        f"--global-batch-size {batch}"
    )


def _case(case: Case) -> tuple[Row, LayerSeconds, tuple[StagePlan, StagePlan]]:
    job = read_flags(command_line(MODELS[case.model], case.stages, case.seq_length).split()).on(_GPUS)
    model = StepModel(job, Cluster.from_spec("h100-8x400g", _GPUS))
    cost, before, count = model.costs(model.works()), job.plan, job.micro_batches
    assert job.pattern is not None and count == _MICRO_BATCHES
    after = plan_pipeline(cost, Pipeline(case.stages, count), current=before)
    steps = [cost.simulate(plan, count).step_time for plan in (before, after)]
    slowest = plan_stages(cost.total, case.stages, embedding=sum(cost.embedding), head=sum(cost.head))
    bound = float(cost.stage_loads(slowest).max()) * count
    held = np.array([model.layer_parameters(kind) for kind in job.kinds]) * (2 + 12 / job.data_parallel)
    move = migration_seconds(before, after, held, _BANDWIDTH, fixed=_REBUILD)
    kinds = {kind: model.layer(kind).total for kind in dict.fromkeys(job.kinds)} | {"head": sum(cost.head)}
    row = Row(
        case.name,
        kinds,
        job.pattern.text(before),
        job.pattern.text(after),
        (steps[0], steps[1], bound),
        int(np.ceil(move / (steps[0] - steps[1]))) if steps[0] > steps[1] else 0,
    )
    return row, cost, (before, after)


def rows(cases: Sequence[Case] = CASES, *, emulated: bool = False) -> list[Row]:
    """A row of each case."""
    found = [_case(case) for case in cases]
    if not emulated:
        return [row for row, _, _ in found]
    from benchmarks.layers.emulated import measure, slowed

    measured = []
    for row, cost, plans in found:
        slower = _STEP / row.seconds[0]
        slow = slowed(cost, slower)
        seconds = measure(plans[0].stages, [(slow, plan, 0.0) for plan in plans], 2)
        ratios = [one / slow.simulate(plan, _MICRO_BATCHES).step_time for one, plan in zip(seconds, plans, strict=True)]
        measured.append(Row(**{**vars(row), "measured": tuple(ratios)}))
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options_of = parser("layers.hybrid", __doc__)
    options_of.add_argument("--emulated", action="store_true", help="also run the pipelines on emulated ranks")
    options_of.add_argument(
        "--cases", nargs="+", metavar="NAME", choices=[each.name for each in CASES], help="only these"
    )
    options = options_of.parse_args(arguments)
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    found = rows(cases, emulated=options.emulated)
    for row in found:
        print(*row.lines(), sep="\n")
    write_rows(options.json, found, "gain")
    return 0 if all(row.within for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
