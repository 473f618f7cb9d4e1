"""Balanced experts where messages of one micro-batch overlap compute of another (`--overlap-moe-expert-parallel-comm`).

Megatron-LM then runs each layer in parts, and the forward pass of one micro-batch alternates with the backward pass of
another.
"""

from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings, without_settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, RankRun, assert_close, join, train, train_rank

BASE = [
    *MODEL,
    *MOCK_DATA,
    *EXACT,
    *MOE,
    *"--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --init-method-std 0.1 --num-layers 3".split(),
    *"--expert-model-parallel-size 2 --global-batch-size 8".split(),
]
GRADIENTS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
# ranks, flags
CASES = {
    "EP 2": (2, ""),
    "EP 2, DP 2, gradients and parameters overlapped": (4, GRADIENTS),
    "interleaved": (4, f"{INTERLEAVED} {GRADIENTS}"),
    "top-3, shared expert": (2, "--moe-router-topk 3 --moe-shared-expert-intermediate-size 32"),
    "slots shared": (2, settings("experts", replica_mode="shared")),
    "one home expert": (2, "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax"),
    "more tokens": (2, "--mtp-num-layers 1 --untie-embeddings-and-output-weights"),
    "ETP 2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"),
}


def _moved(folder: Path) -> Counter:
    """Iteration and layer -> bytes of weights and gradients."""
    lines = events_in(folder)
    return Counter({(x["iteration"], x["layer"]): x["moved_bytes"] for x in lines if x["action"] == "replicate"})


def _train_in_parts(argv: list[str]) -> tuple[RankRun, int]:
    """Train, and count how often parts of two micro-batches ran in turn."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as Plan

    both = 0
    run = Plan.run

    @wraps(run)
    def counted(f_layer: Any, b_layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal both
        both += f_layer is not None and b_layer is not None
        return run(f_layer, b_layer, *args, **kwargs)

    Plan.run = staticmethod(counted)
    return train_rank(argv, True), both


@pytest.mark.parametrize("case", sampled(CASES, "EP 2"))
def test_replicas_of_two_micro_batches_in_parts_change_no_number(pool, tmp_path, case):
    ranks, flags = CASES[case]
    reference = train(pool, ranks, without_settings(flags), base=BASE, parameters=True)
    balanced = f"{flags} --overlap-moe-expert-parallel-comm --balance-report {tmp_path} "
    balanced += f"--balance-experts {settings('experts', min_gain=0)}"
    results = pool.run(ranks, _train_in_parts, [*BASE, *balanced.split()])
    assert all(both > 3 for _, both in results), "hardly anything ran in turn"
    assert_close(join([run for run, _ in results]), reference)
    assert len(events_in(tmp_path, action="replicate")) > 5, "hardly anything was replicated"


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [5, 8])
def test_passes_that_alternate_send_no_weights_twice(pool, tmp_path, layers):
    """Shared slots hold what the passes of both micro-batches need next."""
    flags = f"--num-layers {layers} --balance-experts {settings('experts', min_gain=0, replica_mode='shared')}"
    for name, more in (("one", ""), ("two", "--overlap-moe-expert-parallel-comm")):
        train(pool, 2, f"{flags} {more} --balance-report {tmp_path / name}", base=BASE)
    one, two = _moved(tmp_path / "one"), _moved(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) > 2 * layers
    assert two.total() <= one.total()
