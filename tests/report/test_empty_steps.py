"""Steps in which no token counts for the loss are named in the log and in the report."""

import math
from typing import Any

import pytest

from balancing.report import read_history
from balancing.report.findings import basis
from balancing.report.summary import summarize
from tests.support.events import events_in
from tests.support.training import MOCK_DATA, MODEL, RankRun, train_rank

PP2 = "--pipeline-model-parallel-size 2"
# Iterations without a loss on all ranks, the last one among them; and one in which a rank has one.
EMPTY, HALF, STEPS = (1, 4), 2, 5


def _rank(argv: list[str]) -> RankRun:
    from megatron.training import get_args

    from megatron.balanced.trainer import data

    loss = data._loss

    def masked(loss_mask: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        now = get_args().curr_iteration
        if now in EMPTY or (now == HALF and dist.get_rank() % 2):
            loss_mask = loss_mask * 0
        return loss(loss_mask, *args, **kwargs)

    data._loss = masked
    return train_rank(argv, False)


@pytest.mark.parametrize(
    "ranks, flags", [(2, ""), (4, f"{PP2} --balance-layers"), (4, f"{PP2} --calculate-per-token-loss")]
)
def test_steps_without_a_loss_are_told(pool, tmp_path, ranks, flags):
    flags = f"{flags} --train-iters {STEPS} --lr-decay-iters 100"
    report = f"--balance-report {tmp_path}" if "--calculate" not in flags else "--eod-mask-loss"
    runs = pool.run(ranks, _rank, [*MODEL, *MOCK_DATA, *flags.split(), *report.split()])
    losses = runs[-1].losses
    assert [iteration for iteration, loss in enumerate(losses) if math.isnan(loss)] == list(EMPTY)
    said = [line for rank in range(ranks) for line in pool.output[rank].splitlines() if "no token of any rank" in line]
    assert [line.split(":")[0] for line in said] == [f"> iteration {number + 1}" for number in EMPTY]
    if "--calculate" not in flags:
        events = events_in(tmp_path, action="no loss")
        assert [line["iteration"] for line in events] == [number + 1 for number in EMPTY]
        history = read_history(tmp_path)
        assert not history.damage
        assert "no token counted for the loss in 2 steps" in basis(summarize(history))
