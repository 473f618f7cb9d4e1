"""The thread that plans replicas: what it takes off the thread that launches work, and what it must not disturb."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.patience import PATIENCE
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL, MOE, train_rank

TRAINING = (
    "--num-layers 3 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --init-method-std 0.1 "
    f"--balance-experts {settings('experts', min_gain=0)} --train-iters 6 --global-batch-size 4"
).split()


def _uploads(argv: list[str]) -> list[tuple[int, int, int]]:
    """Train on the paths of a GPU. For each step: the layers that get other replicas when it begins, the copies to the
    device for it, and the tables of placements that this thread builds."""
    from balancing.experts.split import placed_split
    from megatron.balanced.experts import balancer, moe_layer, planning
    from megatron.balanced.experts.balancer import ExpertBalancer
    from tests.support.stand_ins import split_kernels

    moe_layer.is_cpu = planning.is_cpu = lambda: False
    split_kernels.install()
    upload, place, build = placed_split.upload, balancer.place_layers, placed_split.SplitTables.__init__
    begin = ExpertBalancer.begin_schedule
    steps: list[tuple[int, int, int]] = []
    changed = copies = built = 0

    def counted_upload(*args: Any, **named: Any) -> Any:
        nonlocal copies
        copies += 1
        return upload(*args, **named)

    def counted_place(tables: dict) -> None:
        nonlocal changed
        changed += len(tables)
        place(tables)

    def counted_build(*args: Any, **kwargs: Any) -> None:
        nonlocal built
        built += threading.current_thread() is threading.main_thread()
        build(*args, **kwargs)

    def begin_schedule(self: ExpertBalancer) -> None:
        nonlocal changed, copies, built
        changed = copies = built = 0
        begin(self)
        steps.append((changed, copies, built))

    placed_split.upload, balancer.place_layers = counted_upload, counted_place
    placed_split.SplitTables.__init__ = counted_build
    ExpertBalancer.begin_schedule = begin_schedule
    train_rank(argv, False)
    return steps


def test_placements_of_all_layers_come_in_one_copy_of_tables_that_are_ready(pool):
    for steps in pool.run(2, _uploads, [*MODEL, *MOCK_DATA, *MOE, *TRAINING]):
        assert max(changed for changed, _, _ in steps) > 1, "not several layers at once, so nothing was tested"
        assert all(copies == (changed > 0) for changed, copies, _ in steps), steps
        assert all(built == 0 for _, _, built in steps), steps


def _planner(dispatcher: str = "alltoall", machine: Any = None) -> Any:
    from balancing.cluster import Cluster
    from balancing.experts.config import ExpertConfig
    from megatron.balanced.experts.planning import ReplicaPlanner
    from megatron.balanced.shared.job import Job

    model = SimpleNamespace(moe_token_dispatcher_type=dispatcher, cuda_graph_impl="transformer_engine")
    cluster = Cluster.sheet("h200-8x400g").relabel(1, 2)
    return ReplicaPlanner(Job(32, 1, 5), model, ExpertConfig(), machine, cluster, False)


def _where_plans_are_made() -> tuple[bool, list[bool]]:
    """Place replicas as on a GPU, where this process cannot plan. Whether the one that does has imported torch, and
    whether experts get replicas, by the least gain that is asked for."""
    from balancing.experts import plan, plan_replicas
    from balancing.experts.split.placed_split import SplitTables
    from megatron.balanced.experts import planning

    load = np.array([[90, 2, 3, 5], [80, 1, 9, 7]])
    on_cpu = _planner()
    assert on_cpu._worker is None
    planning.is_cpu = lambda: False
    planner = _planner()
    assert planner._worker is not None
    placement = plan_replicas(load, planner._cluster, slots=planner._config.replica_slots)
    alone = SplitTables(plan_replicas(load, planner._cluster, slots=2, method="none"), None)
    layer = SimpleNamespace(without_replicas=alone, tables=lambda placement: SplitTables(placement, None))
    plan.plan_replicas_layers = None
    made = planner._place(layer, load, None, 1).placement
    assert made.digest() == placement.digest()
    gains = []
    for least in (0.0, 0.99):
        object.__setattr__(planner._config, "min_gain", least)
        gains.append(planner._place(layer, load, None, 1) is not alone)
    return planner._worker.call(eval, "'torch' in __import__('sys').modules"), gains


def test_plans_for_a_gpu_are_made_in_a_process_of_their_own(pool):
    """Each operation of the thread that launches work would wait for the thread that plans."""
    assert pool.run(1, _where_plans_are_made) == [(False, [True, False])]


def _replicas_after(swing: float) -> tuple[int, bool]:
    """Replicas after a layer's load has swung around an even one for some iterations: the busier rank has 1 + `swing`
    times the mean, in turns. Also whether the predicted load would get some if it did not drift."""
    from balancing.experts import plan_replicas
    from balancing.experts.split.placed_split import SplitTables
    from megatron.balanced.experts.planning import LayerPlan

    planner = _planner()
    alone = SplitTables(plan_replicas(np.ones((2, 4)), planner._cluster, slots=2, method="none"), None)
    layer = SimpleNamespace(without_replicas=alone, tables=lambda placement: SplitTables(placement, None))
    plan = LayerPlan(alone)
    for iteration in range(1, 21):
        on_first = 1 + swing * (-1) ** iteration
        load = np.rint(1000 * np.array([[on_first, on_first, 2 - on_first, 2 - on_first]] * 2)).astype(int)
        planned = planner._plan(layer, plan, lambda load=load: load[None], iteration, None)
        plan.tables = planned.tables or plan.tables
    known = plan_replicas(plan.history.predict(), planner._cluster, slots=2)
    return plan.placed.replicas, known.replicas > 0


def test_a_load_that_swings_around_an_even_one_gets_replicas(pool):
    """The prediction is even, and nearly always wrong."""
    assert pool.run(1, _replicas_after, 0.15) == [(4, False)]
    assert pool.run(1, _replicas_after, 0.0) == [(0, False)], "nothing to gain"


def _ends_of_a_step() -> list[bool]:
    """Whether all plans are made when a step ends, where layers are captured and where none is. A plan ends only when
    somebody waits for it."""
    from megatron.balanced.experts.balancer import ExpertBalancer
    from megatron.balanced.experts.planning import Planned

    found = []
    for graphs in ("transformer_engine", "none"):
        planner, waited_for = _planner(), threading.Event()

        def plan(*unused: Any, waited_for: threading.Event = waited_for) -> Planned:
            assert waited_for.wait(PATIENCE)
            return Planned(None, 0.0, 0.0)

        def wait(wait: Any = planner.wait, waited_for: threading.Event = waited_for) -> None:
            waited_for.set()
            wait()

        planner._plan, planner.wait = plan, wait
        planner.submit(None, SimpleNamespace(drift=0.0, age=0), [np.zeros((2, 4))], 1, None)
        balancer = object.__new__(ExpertBalancer)
        balancer._model_config = SimpleNamespace(cuda_graph_impl=graphs)
        balancer._planner, balancer._report, balancer._layers_of_chunks, balancer._plans = planner, None, [], {}
        balancer.end_step()
        found.append(all(planned.done() for *_, planned in planner._submitted.values()))
        planner.adopt()
    return found


def test_no_plan_is_being_made_where_layers_may_be_captured(pool):
    """A thread that waits for the device makes a capture fail, and the next one may begin when a step has ended."""
    assert pool.run(1, _ends_of_a_step) == [[True, False]]
