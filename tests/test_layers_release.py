"""Ranks of the last stages leave while the model trains: no number changes, and the job can grow back."""

from typing import Any

import numpy as np
import pytest
from moving import _state_of, _whole, move_at, train_moving
from training import EXACT, MOCK_DATA, MODEL, Run, join, train, watch

PP4 = "--pipeline-model-parallel-size 4"
RELEASE = "--balance-layers --repack-throughput-floor 0.5"
EXACTLY = " ".join(EXACT)
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SINGLE = "--attention-dropout 0 --hidden-dropout 0 --clip-grad 0"
BASE = [*MODEL, *MOCK_DATA, *"--init-method-std 0.1 --train-iters 5 --eval-interval 2 --eval-iters 1".split()]


def _rank(argv: list[str], plans: Any, stay: int) -> tuple[Any, dict[str, Any], int | None]:
    """Train, and leave if told so. Returns the run, the optimizer's state at its end, and the exit code of a leaver."""
    from megatron.balanced.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.balanced import layers, step
    from megatron.balanced.optimizer_state import states_of
    from megatron.balanced.train import train

    state: dict[str, Any] = {}

    def end_step(self: Any) -> None:
        if self.iteration == self._args.train_iters - 1:
            state.update(_state_of(self.mover, states_of(step.trained().optimizer)))

    if plans:
        move_at(plans)
    layers.LayerBalancer.end_step = end_step
    finish = watch(args.rank < stay)
    code = None
    try:
        train(args, config)
    except SystemExit as left:
        code = left.code
    return finish(), state, code


def _train_releasing(pool: Any, ranks: int, stay: int, flags: str, plans: Any) -> tuple[Run, dict[str, np.ndarray]]:
    done = pool.run(ranks, _rank, [*BASE, *RELEASE.split(), *flags.split()], plans, stay)
    assert [code for _, _, code in done] == [None] * stay + [0] * (ranks - stay)
    runs = [run for run, _, _ in done]
    before = max((run.losses for run in runs[stay:]), key=len)
    after = max((run.losses for run in runs[:stay]), key=len)
    assert before and after
    for run in runs:
        run.losses, run.grad_norms = [], []
    validation = [run.validation for run in runs]
    for run in runs:
        run.validation = []
    whole = join(runs[:stay])
    last = max(validation[stay:], key=len) + max(validation[:stay], key=len)
    return Run(before + after, [], last, whole.parameters), _whole([state for _, state, _ in done[:stay]])


# ranks, those that stay, flags, plans
CASES = {
    "PP 4 to 2": (4, 2, EXACTLY, {2: ((3,), (1,))}),
    "PP 4 to 2, DP 2, both overlaps": (8, 4, f"{EXACTLY} {OVERLAPS}", {2: ((2,), (2,))}),
    "PP 4 to 3 to 1": (4, 1, EXACTLY, {1: ((1,), (2,), (1,)), 3: ((4,),)}),
    "PP 4 to 2, bf16, untied": (
        4,
        2,
        f"{SINGLE} --bf16 --untie-embeddings-and-output-weights --use-distributed-optimizer",
        {3: ((1,), (3,))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_nobody_misses_the_ranks_that_left(pool, case):
    ranks, stay, flags, plans = CASES[case]
    run, state = _train_releasing(pool, ranks, stay, f"{PP4} {flags}", plans)
    reference, expected = train_moving(pool, ranks, f"{PP4} {flags}", {}, base=BASE)
    assert run.losses == pytest.approx(reference.losses, rel=1e-12)
    assert run.validation == pytest.approx(reference.validation, rel=1e-12)
    assert run.parameters.keys() == reference.parameters.keys()
    for name, whole in reference.parameters.items():
        np.testing.assert_allclose(run.parameters[name], whole, rtol=1e-12, atol=1e-14, err_msg=name)
    for name, whole in state.items():
        np.testing.assert_allclose(whole, expected[name], rtol=1e-12, atol=1e-14, err_msg=name)
