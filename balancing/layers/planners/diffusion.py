"""Diffusion: decentralized balancing, in which each stage exchanges loads and boundary layers with its neighbours only.

DynMo names such a balancer and proves a bound, but its published code gathers everything on rank 0 and sends layers to
any rank, which loses their order. For indivisible loads no balancer by matching has a bounded convergence time (Gilbert
et al., arXiv 2105.13194). Greedy neighbours stop at staircases: stages of 8, 7, 6, 5 equal layers differ by one from
each neighbour and by three from end to end. So this planner first computes the flow of divisible loads and then moves
layers along it:

1. Flow. Stages exchange numbers, not layers. In each round, every pair (s, s + 1) moves half of the difference of its
   two loads along its link, and both stages add up the flow of the link. A round multiplies the loads by M = I - A/2
   with A the Laplacian of the path. M is symmetric, its rows sum to 1, and its eigenvalues are cos(pi k / P) for k = 0
   to P - 1. So the mean is constant, and each round multiplies the norm of the deviation from the mean by at most
   cos(pi / P). R is chosen such that cos(pi / P)^R is at most 1e-4 / P, about 2.5 P^2 rounds. The flows are then the
   loads that each link must carry to make all stages equal, the fixed point of divisible loads.
2. Layers. In even rounds the pairs are (0, 1), (2, 3), ..., in odd rounds the others. The sender of a link passes its
   boundary layer if that brings the link's remaining flow closer to zero, that is if the layer costs less than twice
   the flow. Each move lowers |remaining flow| of its link and of no other link, and there are finitely many partitions,
   so this terminates. Then each link whose sender has a layer to spare is within half of its boundary layer of the
   fixed point. A stage between two such links is within one layer, the largest. Without fixed loads and with least = 0
   this holds for every stage: the links of an empty stage carry more to it than from it.
3. Smoothing. The same pairs continue while passing the boundary layer lowers the sum of the squares of their two
   loads. It does if the layer costs less than the difference of the loads. The sum over all stages falls by the same
   amount, so this terminates, too. Neighbours then differ by at most the boundary layer of the slower one (unless the
   slower one has no layer to spare, or the other one no memory). Both new loads are between the two old ones, so the
   largest deviation from the mean does not grow.

The pairs of a round share no stage, so all moves of a round can happen at the same time. A stage keeps `least` layers,
and a layer never moves to a stage where it does not fit. Layers of zero cost move together with the next layer of
non-zero cost.
"""

import math

import numpy as np
from numpy.typing import NDArray

from balancing.layers.planners.problem import Problem, room_of

__all__ = ["neighbour_flows", "plan_diffusion"]

FloatArray = NDArray[np.float64]
_LEFT = 1e-4  # flows have converged when the deviation is _LEFT / stages of the initial one
_STRICT = 1 - 1e-9  # with this factor, rounding cannot make both a move and its reverse an improvement


def neighbour_flows(load: FloatArray) -> FloatArray:
    """Float array [stage - 1]: the load that must flow from stage s to s + 1 to make all loads equal. load: [stage]."""
    load = np.array(load, dtype=float)
    stages = len(load)
    carried = np.zeros(max(stages - 1, 0))
    if stages < 2 or not load.any():
        return carried
    rounds = 1 if stages == 2 else math.ceil(math.log(_LEFT / stages) / math.log(math.cos(math.pi / stages)))
    for _ in range(rounds):
        step = 0.5 * (load[:-1] - load[1:])
        carried += step
        load[:-1] -= step
        load[1:] += step
    return carried


def plan_diffusion(problem: Problem) -> list[int]:
    """The boundaries of the plan in force moved by diffusion until it has converged. Plans one chunk a stage."""
    bounds, stages, least = list(problem.start), problem.stages, problem.least
    fixed, room = problem.fixed_load(), room_of(problem, [0] * stages + [problem.layers], 0)
    prefix = np.concatenate([[0.0], np.cumsum(problem.cost)])
    load = fixed + np.diff(prefix[np.asarray(bounds)])
    remaining = neighbour_flows(load)
    layer_cost = problem.cost.tolist()

    def fits(stage: int, first: int, last: int) -> bool:
        """Whether layers first to last - 1 fit on the stage."""
        return room is None or bool(room.over(np.array(first), np.array(last))[stage] <= 0)

    def boundary(link: int, rightwards: bool) -> tuple[int, float]:
        """The new boundary of the link, and the cost of the layer that crosses it; the cost is 0 if no layer can."""
        step, old = (-1, bounds[link + 1]) if rightwards else (1, bounds[link + 1])
        spare = (old - bounds[link] if rightwards else bounds[link + 2] - old) - least
        new, crossing = old, 0.0
        while crossing == 0 and abs(new - old) < spare:
            crossing = layer_cost[new - 1 if rightwards else new]
            new += step
        able = fits(link + 1, new, bounds[link + 2]) if rightwards else fits(link, bounds[link], new)
        return (new, crossing) if able else (old, 0.0)

    def follow(link: int) -> bool:
        rightwards = remaining[link] > 0
        border, crossing = boundary(link, rightwards)
        if not 0 < crossing < 2 * abs(remaining[link]) * _STRICT:
            return False
        remaining[link] -= crossing if rightwards else -crossing
        bounds[link + 1] = border
        return True

    def smooth(link: int) -> bool:
        left, right = (fixed[s] + prefix[bounds[s + 1]] - prefix[bounds[s]] for s in (link, link + 1))
        border, crossing = boundary(link, left > right)
        if not 0 < crossing < abs(left - right) * _STRICT:
            return False
        bounds[link + 1] = border
        return True

    for rule in (follow, smooth):
        quiet, turn = 0, 0
        while quiet < 2:  # until neither the even nor the odd links move a layer
            moved = sum(rule(link) for link in range(turn, stages - 1, 2))
            quiet = 0 if moved else quiet + 1
            turn = 1 - turn
    return bounds
