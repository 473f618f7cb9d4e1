"""What Megatron-LM's loop does with batches beside `forward_step`, where balanced sequences have other batches.

`PLACES` lists the functions of its trainer that see a batch or an iterator, each with what covers it. A release with a
further one fails here.
"""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_packed_documents import PP, SP, Packed
from tests.sequences.test_training import BALANCED, CP, LOSS
from tests.support.sampled import sampled
from tests.support.training import RankRun, assert_close, join, train_rank

SHORT = "--global-batch-size 4 --train-iters 5"
SKIPS = "--iterations-to-skip 2 4"  # of 5
EVALUATES = f"--eval-interval 3 --eval-iters 2 {SKIPS}"
VPP = "--num-virtual-stages-per-pipeline-rank"

PLACES = {
    "update_seqlen_stats_from_cu_seqlens": "test_counts_the_same_flops",
    "dummy_train_step": "test_skipped_iterations",
    "train_step": "test_steps_that_run_twice",
    "save_checkpoint_and_time": "saves the batches that test_steps_that_run_twice keeps, as they are",
    "checkpoint_and_decide_exit": "passes the iterator to save_checkpoint_and_time",
    "train": "test_skipped_iterations; --hybrid-context-parallel is refused, and the wheel has no megatron.rl",
    "evaluate": "test_validation",
    "evaluate_and_print_results": "test_validation",
    "pretrain": "passes iterators to train and evaluate",
    "build_train_valid_test_data_loaders": "every test; --full-validation is refused",
    "build_train_valid_test_data_iterators": "every test; --dataloader-type external is refused",
}


def _sees_a_batch(function: ast.AST) -> bool:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return any(re.search(r"data_iterator|dataloader|get_batch_on|cu_seqlens|^batch$|^tokens$", name) for name in names)


def test_every_place_is_known():
    from megatron.training import training

    trainer = Path(training.__file__)
    files = [trainer, *sorted(trainer.parent.glob("utils/*.py"))]
    bodies = [node for file in files for node in ast.parse(file.read_text()).body]
    assert {node.name for node in bodies if hasattr(node, "name") and _sees_a_batch(node)} == PLACES.keys()


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("beside"), SHORT)


SKIPPING = {
    "CP 2": (2, f"{CP} 2"),
    "CP 2, DP 2, one domain, in workers": (4, f"{CP} 2 --sequence-domain data --num-workers 1"),
    "CP 2, TP 2": (4, f"{CP} 2 {SP}"),
    "CP 2, PP 2, interleaved": (4, f"{CP} 2 {PP} 2 {VPP} 2"),
    "PP 2, DP 2, documents dealt": (4, f"{PP} 2 --sequence-micro-batches"),
}


@pytest.mark.parametrize("layout", sampled(SKIPPING, *SKIPPING))
def test_skipped_iterations(packed, layout):
    ranks, flags = SKIPPING[layout]
    assert_close(packed.train(ranks, f"{BALANCED} {SKIPS} {flags}"), packed.alone(f"{LOSS} {SKIPS}"))


def test_skipped_iterations_of_a_pipeline_without_balancers(packed):
    """Megatron-LM draws from a list of iterators there, and on middle stages from none."""
    for flags in (f"{PP} 2 {VPP} 2", f"{PP} 4"):
        ranks = 4 if "4" in flags else 2
        assert_close(packed.train(ranks, f"{flags} {SKIPS}"), packed.alone(SKIPS))


def _train(argv: list[str], twice: bool) -> tuple[RankRun, list[Any]]:
    """Train. Returns the batches that each step ran `twice` on, else its real tokens and the sum of their squares."""
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunState, RerunStateMachine
    from megatron.training import training

    seen: list[Any] = []
    consume, rewind = training.consume_seqlen_stats_in_iteration, RerunDataIterator.rewind

    def consumed() -> Any:
        seen.append(consume())
        return seen[-1]

    def rewound(self: Any) -> None:
        seen.append(len(self.saved_microbatches))
        rewind(self)

    def doubted(self: Any, *unused: Any, **also_unused: Any) -> None:
        self.rerun_requested |= self.state == RerunState.INITIAL_RUN
        self.continue_requested |= self.state == RerunState.RERUNNING_IN_PLACE

    if twice:
        RerunDataIterator.rewind, RerunStateMachine.validate_result = rewound, doubted
    else:
        training.consume_seqlen_stats_in_iteration = consumed
    return train_rank(argv, True), seen


@pytest.mark.parametrize("flags", [f"{CP} 2", f"{PP} 2 --sequence-micro-batches"])
def test_steps_that_run_twice(packed, flags):
    """Megatron-LM runs a step again on the batches that it has kept."""
    argv = packed.from_start(f"{BALANCED} {flags} --rerun-mode validate_results")
    runs, seen = zip(*packed.pool.run(2 if CP in flags else 4, _train, argv, True), strict=True)
    assert_close(join(list(runs)), packed.alone(LOSS))
    assert all(len(one) == 5 and min(one) > 0 for one in seen), "no step ran again"


def test_counts_the_same_flops(packed):
    counted = {}
    for name, ranks, flags in (("plain", 1, LOSS), ("balanced", 4, f"{BALANCED} {CP} 2")):
        told = packed.pool.run(ranks, _train, packed.from_start(f"{flags} {SKIPS}"), False)
        counted[name] = [seen for _, seen in told]
    assert all(seen == counted["plain"][0] for seen in counted["balanced"])
    assert len(counted["plain"][0]) == 3 and all(tokens for tokens, _ in counted["plain"][0])


def test_validation(packed):
    """After skipped iterations, too."""
    packed.base[packed.base.index("100,0,0")] = "80,20,0"
    try:
        alone, run = (packed.train(*one) for one in ((1, f"{LOSS} {EVALUATES}"), (2, f"{BALANCED} {EVALUATES} {CP} 2")))
    finally:
        packed.base[packed.base.index("80,20,0")] = "100,0,0"
    assert_close(run, alone)
    assert len(run.validation) == len(alone.validation) >= 1
    np.testing.assert_allclose(run.validation, alone.validation, rtol=1e-6)  # which Megatron-LM sums in float32
