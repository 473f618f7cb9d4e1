"""Steps that trials leave out in `pretrain_gpt.py`: data loaders give each rank the tokens that Megatron-LM gives it.
The model is the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_domain import CP, ENDS, EP, OVERLAPS, PER_TOKEN, SHARED
from tests.sequences.test_packed_documents import PP, Packed
from tests.support.events import events_in
from tests.support.leave_out import leave_out
from tests.support.settings import settings
from tests.support.training import MOE, RankRun, Run, assert_close, join, train, train_rank

LEFT_OUT = (1, 2, 4)  # of 6
SHORT = "--global-batch-size 4 --train-iters 6 --disable-bias-linear"
DEALT = f"{PP} 2 --sequence-micro-batches --global-batch-size 8"

# ranks, flags
LAYOUTS = {
    "DP 4": (4, ""),
    "DP 2, CP 2, both overlaps": (4, f"{CP} 2 {OVERLAPS}"),
    "DP 2, CP 2 alone, in workers": (4, f"{CP} 2 --sequence-domain context --num-workers 2"),
    "DP 2, micro-batches of two": (2, "--micro-batch-size 2"),
    "DP 2, PP 2, documents dealt": (4, DEALT),
}


class Seen:
    """What the schedule of each iteration got on this rank: tokens, and the method of the plan, or None without one."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.methods: list[set[str | None]] = []
        self.place = 0, 0  # data- and context-parallel rank

    def add(self, tokens: Any, method: str | None) -> None:
        from megatron.core import mpu
        from megatron.training import get_args

        self.place = mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()
        if len(self.tokens) <= (at := get_args().curr_iteration):
            self.tokens.append(np.zeros(0, int))
            self.methods.append(set())
        self.tokens[at] = np.append(self.tokens[at], tokens.numpy())
        self.methods[at].add(method)


def _train(argv: list[str], steps: tuple[int, ...], members: int = 0) -> tuple[RankRun, Seen]:
    """members: data-parallel ranks of each group of a domain; 0 for one group."""
    from balancing.sequences.planners import groups
    from megatron.balanced.sequences.moved_tokens import MovedTokens
    from megatron.balanced.trainer import data

    seen, moved, plain = Seen(), MovedTokens.next_batch, data._next_batch
    groups._MEMBERS = members or groups._MEMBERS

    def next_moved(self: Any, *args: Any, **named: Any) -> Any:
        batch = moved(self, *args, **named)
        seen.add(batch.inputs["tokens"], batch.plan.method)
        return batch

    def next_plain(*args: Any, **named: Any) -> Any:
        batch = plain(*args, **named)
        if batch is not None:
            seen.add(batch["tokens"], None)
        return batch

    MovedTokens.next_batch, data._next_batch = next_moved, next_plain
    leave_out(steps)
    return train_rank(argv, True), seen


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("left_out"), SHORT)


@pytest.mark.parametrize("loss", ["", pytest.param(PER_TOKEN, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_tokens_of_megatron_and_no_number_changes(packed, tmp_path, layout, loss):
    ranks, flags = LAYOUTS[layout]
    argv = packed.from_start(f"{SHARED} {flags} {loss} --balance-report {tmp_path}")
    told = packed.pool.run(ranks, _train, argv, LEFT_OUT)
    size = " ".join(flag for flag in ("--micro-batch-size 2", "--global-batch-size 8") if flag in flags)
    assert_close(join([run for run, _ in told]), packed.alone(f"{ENDS} {loss} {size}"))

    ways, data = 1 + (CP in flags), 4 if layout == "DP 4" else 2
    plain = packed.pool.run(data, _train, packed.from_start(f"{ENDS} {loss} {size}"), ())
    rows = {seen.place[0]: seen.tokens for _, seen in plain}
    for _, seen in told:
        if not seen.tokens:  # a stage without data
            continue
        replica, way = seen.place
        for step, (tokens, methods) in enumerate(zip(seen.tokens, seen.methods, strict=True)):
            assert (methods == {"given"}) == (step in LEFT_OUT)
            whole = rows[replica][step].reshape(-1, 2 * ways, packed_row(size) // (2 * ways))
            same = np.array_equal(tokens, whole[:, [way, 2 * ways - 1 - way]].ravel())
            assert same if step in LEFT_OUT else not same or ways > 1
    spread = {line["iteration"] for line in events_in(tmp_path, balancer="sequences", action="spread")}
    assert spread == {step + 1 for step in range(6) if step not in LEFT_OUT}


def packed_row(size: str) -> int:
    """Tokens of a micro-batch."""
    return 32 * (2 if "--micro-batch-size 2" in size else 1)


@pytest.mark.exhaustive
def test_groups_of_a_large_domain(packed):
    argv = packed.from_start(f"{SHARED} {CP} 2")
    told = packed.pool.run(8, _train, argv, LEFT_OUT, 2)
    assert_close(join([run for run, _ in told]), packed.alone(ENDS))


def test_trials_of_both_change_no_number(pool, tmp_path):
    """By the clock, from a checkpoint within a round, too."""
    experts = f"{' '.join(MOE)} --moe-token-dispatcher-type alltoall"
    model = Packed(pool, tmp_path, f"{experts} --global-batch-size 2 --train-iters 52 --disable-bias-linear")
    ends = f"{ENDS} {EP} 2"
    trials = f"--balance-experts {settings('experts', min_gain=0)} {settings('trials', share=1.0)}"
    flags = f"{SHARED} {EP} 2 {trials} --balance-report {tmp_path / 'report'} --num-workers 1"
    run = model.train(2, f"{flags} --save {tmp_path / 'saved'} --save-interval 18")
    assert_close(run, model.train(2, ends))
    told = {line["balancer"]: line for line in events_in(tmp_path / "report", action="trial")}
    assert {name: line["pairs"] for name, line in told.items()} == {"experts": 10, "sequences": 10, "together": 5}
    resumed = model.whole(f"{flags} --load {tmp_path / 'saved'} --ckpt-step 18")
    assert_close_from(model, resumed, run)


def assert_close_from(model: Packed, argv: list[str], whole: Run) -> None:
    """A run that goes on ends as the whole run did."""
    rest = train(model.pool, 2, base=argv, parameters=True)
    assert 0 < len(rest.losses) < len(whole.losses)
    assert_close(replace(rest, losses=whole.losses[: -len(rest.losses)] + rest.losses), whole)
