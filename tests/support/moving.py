"""Train on the pool with layers moved at given iterations, and keep the optimizer's state by global names, too."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.support.training import MOCK_DATA, MODEL, RankRun, Run, join, train_rank

# iteration (from 0) -> layers of each chunk, [stage][virtual]
Plans = Mapping[int, tuple[tuple[int, ...], ...]]


def move_at(plans: Plans) -> None:
    """Have layers move by `plans` instead of by what they cost."""
    from balancing.pipeline.stage_plan import StagePlan
    from megatron.balanced.layers import balancer as layers

    def between_steps(self: Any, step: int) -> None:
        self.iteration = step
        if step in plans:
            self.move_to(StagePlan.from_counts(plans[step]))

    layers.LayerBalancer.between_steps = between_steps


def at_end_of_step(see: Callable[[Any], Any]) -> None:
    """Have `see` look at the layer balancer at the end of each step."""
    from megatron.balanced.layers import balancer as layers

    end = layers.LayerBalancer.end_step

    def end_step(self: Any) -> None:
        end(self)
        see(self)

    layers.LayerBalancer.end_step = end_step


def moving_rank(argv: list[str], plans: Plans) -> tuple[RankRun, dict[str, Any]]:
    """The body of one rank. Returns the run, and this rank's pieces of the optimizer's state."""
    from megatron.balanced.shared.optimizer_state import states_of

    seen: dict[str, Any] = {"layouts": {}}

    def see(balancer: Any) -> None:
        seen["layouts"][balancer.iteration] = tuple(tuple(map(len, stage)) for stage in balancer.mover.plan.chunks)
        if balancer.iteration == balancer._planner._iterations - 1:
            seen["state"] = _state_of(balancer.mover, states_of(balancer.run.optimizer))

    move_at(plans)
    at_end_of_step(see)
    run = train_rank(argv, True)
    return run, seen


def _state_of(mover: Any, states: Any) -> dict[str, Any]:
    from megatron.balanced.layers.layer_tensors import named_parameters

    pieces = {}
    for name, parameter in named_parameters(mover.models()):
        state = states.get(parameter)
        if state is not None:
            where = name.split(".", 2)[2] if name.startswith("stage") else name  # which the end of a run may differ in
            for kind, tensor in state.tensors.items():
                pieces[f"{where}:{kind}"] = (state.start, parameter.numel(), tensor.double().numpy())
            for kind, number in state.scalars.items():
                pieces[f"{where}:{kind}"] = (0, 1, np.array([float(number)]))
    return pieces


def _whole(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The optimizer's state, put together from all ranks. Raises AssertionError where replicas differ."""
    state: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, (start, size, values) in rank.items():
            whole = state.setdefault(name, np.full(size, np.nan))
            part = whole[start : start + len(values)]
            assert np.isnan(part).all() or np.array_equal(part, values), f"replicas of {name} differ"
            part[:] = values
    assert not any(np.isnan(whole).any() for whole in state.values())
    return state


def train_moving(
    pool: Any,
    world_size: int,
    flags: str,
    plans: Plans,
    *,
    base: list[str] | None = None,
    body: Callable[[list[str], Plans], Any] = moving_rank,
) -> tuple[Run, dict[str, np.ndarray]]:
    """Train with the layers of each chunk as `plans` says from the given iterations on. body: of one rank."""
    argv = [*(MODEL + MOCK_DATA if base is None else base), *flags.split(), "--balance-layers"]
    ranks = pool.run(world_size, body, argv, plans)
    layouts = ranks[0][1]["layouts"]
    assert all(layouts[step] == plan for step, plan in plans.items()), "not every plan was followed"
    assert not plans or len(set(layouts.values())) > 1 or list(plans) == [0], "nothing moved"
    return join([run for run, _ in ranks]), _whole([seen["state"] for _, seen in ranks])
