"""Who calls the library plans and runs what training does: each call that training's wiring makes, made once more as a
user would, with nothing but what must be given."""

from collections import Counter
from typing import Any

import pytest

from balancing.experts import plan_replicas
from balancing.experts.config import ExpertConfig
from balancing.layers import GateConfig, Pipeline, plan_pipeline
from balancing.layers.config import LayerConfig
from balancing.sequences import compile_rank, plan_sequences
from balancing.sequences.config import SequenceConfig
from tests.sequences.test_training import BALANCED
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.training import EXACT, MODEL, MOE, train_rank

# What a user would write, by module of the wiring and name: from the arguments that training gave, without its options.
BY_HAND = {
    "sequences.planner.plan_sequences": lambda lengths, cluster, *, shape, **_: plan_sequences(
        lengths, cluster, shape=shape
    ),
    "sequences.planner.compile_rank": lambda plan, rank, **_: compile_rank(plan, rank),
    "experts.planning.plan_replicas": lambda load, cluster, *, drift, keep, **_: plan_replicas(
        load, cluster, slots=ExpertConfig().replica_slots, drift=drift, keep=keep
    ),
    "layers.planning.plan_pipeline": lambda cost, pipeline, *, current, **_: plan_pipeline(
        cost, Pipeline(pipeline.stages, pipeline.micro_batches), current=current
    ),
}


def _beside(argv: list[str], per_node: int) -> tuple[Counter[str], list[str], list[Any]]:
    """Train this rank. Returns how often each function was called, those whose result was another than the library's,
    and the (cluster, shape) of plans."""
    import importlib
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    calls: Counter[str] = Counter()
    others: list[str] = []
    made_for: list[Any] = []

    def beside(path: str, by_hand: Any) -> None:
        place, _, name = path.rpartition(".")
        module = importlib.import_module(f"megatron.balanced.{place}")
        function = getattr(module, name)

        def called(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            calls[name] += 1
            if result != by_hand(*args, **options):
                others.append(f"{path} with {options}")
            if name == "compile_rank":
                made_for.append((args[0].cluster, args[0].shape))
            return result

        setattr(module, name, called)

    for path, by_hand in BY_HAND.items():
        beside(path, by_hand)
    train_rank(argv, False)
    return calls, others, made_for


@pytest.mark.parametrize("per_node", [4, 1], ids=["one node", "a node each"])
def test_training_runs_what_the_library_makes(pool, tmp_path, per_node):
    """Plans of all three balancers, and programs of sequences, on one node and over nodes."""
    model = "--num-layers 4 --global-batch-size 4 --train-iters 8 --init-method-std 0.1"
    layout = "--context-parallel-size 2 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2"
    balance = "--balance-experts --balance-layers --layer-balance-interval 2"
    documents = write_documents(tmp_path / "documents", heavy_tailed(100, seed=1))
    argv = [*MODEL, *documents, *EXACT, *MOE, *f"{model} {BALANCED} {layout} {balance}".split()]
    for calls, others, made_for in pool.run(4, _beside, argv, per_node):
        assert not others
        assert {"plan_sequences", "compile_rank", "plan_replicas", "plan_pipeline"} <= calls.keys(), calls
        for cluster, shape in made_for:
            assert cluster.world_size == 2 and cluster.nodes == (1 if per_node == 4 else 2)
            assert (shape.heads_of_rank, shape.item_bytes) == ((4, 4), 8), "of this model, in float64"


def test_settings_of_training_are_those_of_the_library():
    """What wiring reads from a config and the library has a default for."""
    assert LayerConfig().gate == GateConfig(LayerConfig().min_gain, LayerConfig().interval)
    config = SequenceConfig()
    assert (config.planner, config.chunk, config.token_capacity, config.routing, config.kernel) == (
        plan_sequences.__kwdefaults__["method"], 0, 0, 0, "auto",
    ), "0 stands for the library's own choice"  # fmt: skip
    assert compile_rank.__kwdefaults__ == {"routing": "auto"}
