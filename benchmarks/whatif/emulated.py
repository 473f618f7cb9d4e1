"""Forecasts of configurations that ran on the emulated cluster, by the constants of that cluster.

Each configuration ran without a balancer and with it; the figures are those of the log. A forecast gets the model, the
machine that is emulated and the loads: tokens of experts, lengths of documents, the number of frozen layers. Compute is
paced there, so kernels are as fast as the machine's sheet says and nothing is bound by memory; links have the rates of
the sheet. Nothing is fitted.

Not compared: emulated runs of all balancers together, whose layers differ in ways that no flag of a job tells.
"""

import json
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from balancing.cluster import Cluster
from balancing.layers import plan_stages
from balancing.sequences import AttentionShape
from balancing_tools.load_trace import LoadTrace
from balancing_tools.whatif.forecast import Forecast, forecast, forecast_loads
from balancing_tools.whatif.gains import batch_loads
from balancing_tools.whatif.job import Job, read_flags
from balancing_tools.whatif.lengths import draw_batch
from balancing_tools.whatif.step import Efficiency, StepModel
from benchmarks.experts.emulated import EXPERT_SECONDS
from benchmarks.experts.emulated_workload import Scale as ExpertScale
from benchmarks.experts.emulated_workload import made_up_loads
from benchmarks.layers.traces import trace
from benchmarks.sequences.emulated_workload import CLUSTERS, SHAPES
from benchmarks.sequences.emulated_workload import Scale as SequenceScale

__all__ = ["Row", "compare"]

_FILE = Path(__file__).with_name("emulated.json")
_PACED = Efficiency(
    linear=1.0, attention=1.0, experts=1.0, memory=math.inf, fp8=1.0, tensor_exposed=1.0, expert_exposed=1.0,
    data_exposed=0.0, overlapped=1.0, layer_seconds=0.0, host_seconds=0.0, ampere=1.0,
)  # fmt: skip
_FLASH = 0.6  # of a matrix product's FLOP/s, that emulated attention of documents reaches
_SMALLEST_HEAD = "--vocab-size 1 --make-vocab-size-divisible-by 1"  # none is emulated
_TOKENS, _SLOWER = 4096, 100.0  # of a rank, and emulated seconds for each modelled one, of documents
_STEP, _STAGES, _MICRO_BATCHES = 6.0, 8, 32  # of pipelines; seconds that a uniform one was to take


@dataclass(frozen=True)
class Row:
    """One configuration. emulated, forecast: seconds of a step, without and with the balancer."""

    name: str
    emulated: tuple[float, float]
    forecast: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """The forecast over what was emulated, less 1."""
        without, balanced = (told / ran - 1 for told, ran in zip(self.forecast, self.emulated, strict=True))
        return without, balanced

    @property
    def gains(self) -> tuple[float, float]:
        """Times that the balancer is faster, emulated and forecast."""
        return self.emulated[0] / self.emulated[1], self.forecast[0] / self.forecast[1]


def compare() -> list[Row]:
    """All configurations of `emulated.json`."""
    kinds = {"experts": _experts, "sequences": _sequences, "layers": _layers}
    content = json.loads(_FILE.read_text())
    return [kinds[kind](row) for kind, part in content.items() for row in part["rows"]]


def _row(name: str, row: dict[str, Any], found: list[Forecast], balancer: str, slower: float) -> Row:
    told = {one.balancer: one.step_seconds * slower for one in found}
    without, balanced = row["seconds"]
    return Row(name, (without, balanced), (told["none"], told[balancer]))


def _job(flags: str, gpus: int) -> Job:
    return read_flags(shlex.split(flags)).on(gpus)


def _experts(row: dict[str, Any]) -> Row:
    ranks, layers, count = row["ranks"], 4, 4
    scale = ExpertScale(ranks, 32, EXPERT_SECONDS[ranks])
    job = _job(
        f"--num-layers {layers} --hidden-size 4096 --ffn-hidden-size 14336 --swiglu --num-attention-heads 32 "
        f"--seq-length 8192 --micro-batch-size 1 --global-batch-size {count * ranks} --num-experts 32 "
        "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
        f"--expert-model-parallel-size {ranks} {_SMALLEST_HEAD}",
        ranks,
    )
    loads: str | LoadTrace = "even"
    if row["loads"] != "even":
        made_up = made_up_loads(scale, layers, count, 3)
        records = np.stack([made_up.before[0], made_up.now[0]]) * round(scale.tokens)
        loads = LoadTrace(records, np.arange(2), np.arange(layers))
    found = forecast(job, scale.cluster, routing=loads, efficiency=_PACED)
    return _row(f"experts, {row['loads']}, {ranks} ranks", row, found, "experts", scale.time)


def _sequences(row: dict[str, Any]) -> Row:
    nodes, per_node = CLUSTERS[row["cluster"]]
    scale, shape = SequenceScale(nodes, per_node, _SLOWER), SHAPES[row["model"]]
    ranks = nodes * per_node
    job = _job(
        f"--num-layers 1 {_sizes(shape)} --seq-length {_TOKENS * ranks} --micro-batch-size 1 "
        f"--context-parallel-size {ranks} {_SMALLEST_HEAD}",
        ranks,
    )
    model = StepModel(job, scale.cluster, replace(_PACED, attention=_FLASH))
    lengths = draw_batch(row["documents"], _TOKENS * ranks, np.random.default_rng(0))
    found = forecast_loads(model, None, batch_loads(model, [lengths]))
    return _row(f"sequences, {row['model']}, {row['documents']}, {row['cluster']}", row, found, "sequences", _SLOWER)


def _sizes(shape: AttentionShape) -> str:
    return (
        f"--hidden-size {shape.hidden} --num-attention-heads {shape.heads} --group-query-attention --num-query-groups "
        f"{shape.kv_heads} --ffn-hidden-size {shape.ffn_hidden} --swiglu"
    )


def _layers(row: dict[str, Any]) -> Row:
    costs = trace(row["case"], 48, 40).costs[-1]
    uniform = plan_stages(np.ones(48), _STAGES, method="uniform")
    slower = _STEP / costs.simulate(uniform, _MICRO_BATCHES).step_time  # as benchmarks.layers.emulated has it
    frozen = int((costs.backward == 0).sum())
    job = _job(
        "--num-layers 48 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32 --seq-length 2048 "
        f"--vocab-size 32000 --micro-batch-size 1 --global-batch-size {_MICRO_BATCHES} "
        f"--pipeline-model-parallel-size {_STAGES} --freeze-layers {frozen}",
        _STAGES,
    )
    fast = Cluster(1, _STAGES, _STAGES, 1e15, 1e15, 400e12, 80e9)  # the trace's FLOP/s; messages are a few bytes
    found = forecast(job, fast, efficiency=_PACED)
    return _row(f"layers, {row['case']}, {_STAGES} stages", row, found, "layers", slower)
