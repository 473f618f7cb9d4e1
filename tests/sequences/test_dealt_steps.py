"""Documents dealt over the micro-batches of a step (`--sequence-micro-batches`) train the same model as on one rank.

The reference is Megatron-LM on one rank, which has the documents where they were drawn. Ends of documents have no loss
here, so micro-batches have unequal numbers of losses, and without --calculate-per-token-loss a token counts more in one
than in another.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_domain import EP, Routed, assert_alike
from tests.sequences.test_packed_documents import PACKED, PP, SP, Packed
from tests.support.events import events_in
from tests.support.refusals import assert_accepted, assert_refused
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL, MOE, RankRun, Run, assert_close, join, train, train_rank

CP = "--context-parallel-size"
ENDS = f"{PACKED} --eod-mask-loss"
DEALT = f"{ENDS} --balance-sequences --sequence-micro-batches"
PER_TOKEN = "--calculate-per-token-loss"
# Without the bias of keys, whose gradient is rounding noise: sums in another order make it another one.
SHORT = "--global-batch-size 8 --train-iters 2 --disable-bias-linear"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
VPP = "--num-virtual-stages-per-pipeline-rank 2"

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

# ranks, flags
LAYOUTS = {
    "PP 2": (2, f"{PP} 2"),
    "PP 2, CP 2": (4, f"{PP} 2 {CP} 2"),
    "PP 2, DP 2": (4, f"{PP} 2"),
    "PP 2, DP 2, apart": (4, f"{PP} 2 --sequence-domain context"),
    "PP 2, CP 2, DP 2, both overlaps": (8, f"{PP} 2 {CP} 2 --sequence-domain data {OVERLAPS}"),
    "PP 2, interleaved": (2, f"{PP} 2 {VPP}"),
    "PP 2, interleaved, CP 2": (4, f"{PP} 2 {CP} 2 {VPP}"),
    "PP 4": (4, f"{PP} 4"),
    "PP 2, TP 2, sequence parallel": (4, f"{PP} 2 {SP}"),
    "PP 2, micro-batches of two": (2, f"{PP} 2 --micro-batch-size 2"),
    "PP 2, full recompute": (2, f"{PP} 2 {RECOMPUTE}"),
    "PP 2, one worker": (2, f"{PP} 2 --num-workers 1"),
}  # fmt: skip
FIRST = "PP 2"


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("dealt"), SHORT)


def _dealt(folder) -> list[dict[str, Any]]:
    lines = events_in(folder)
    return [line for line in lines if line["balancer"] == "sequences" and line["action"] == "spread"]


@pytest.mark.parametrize(
    ("layout", "loss"),
    sampled(itertools.product(LAYOUTS, ("", PER_TOKEN)), (FIRST, "")),
)
def test_dealt_documents_equal_one_rank(packed, tmp_path, layout, loss):
    """And a step is shorter by the model: rows of unequal number pass between the stages."""
    ranks, flags = LAYOUTS[layout]
    size = "--micro-batch-size 2" if "--micro-batch-size 2" in flags else ""  # in which losses are averaged
    reference = packed.alone(f"{ENDS} {loss} {size}")
    assert_close(packed.train(ranks, f"{DEALT} {flags} {loss} --balance-report {tmp_path}"), reference)
    spread = _dealt(tmp_path)
    assert spread
    for line in spread:
        assert line["micro_batch_step_after"] <= line["micro_batch_step_before"]
    assert any(line["micro_batch_step_after"] < 0.99 * line["micro_batch_step_before"] for line in spread)


# Where Megatron-LM's micro-batches stay whole.
ALL_LOSSES = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-1 2e-1 --moe-z-loss-coeff 1e-2 "
    "--moe-router-score-function sigmoid"
)
# ranks, flags
WHOLE = {
    "PP 2, DP 2": (4, f"{PP} 2"),
    "PP 2, DP 2, EP 2, balanced": (4, f"{PP} 2 {EP} 2 --balance-experts {settings('experts', min_gain=0)}"),
    "PP 2, DP 2, apart": (4, f"{PP} 2 --sequence-domain context"),
    "PP 2, CP 2, DP 2, both overlaps": (8, f"{PP} 2 {CP} 2 --sequence-domain data {OVERLAPS}"),
    "PP 2, DP 2, interleaved": (4, f"{PP} 2 {VPP}"),
    "PP 2, DP 2, messages overlapped": (4, f"{PP} 2 {VPP} {EP} 2 --overlap-moe-expert-parallel-comm"),
    "PP 2, DP 2, TP 2, sequence parallel": (8, f"{PP} 2 {SP}"),
    "PP 2, DP 2, micro-batches of two": (4, f"{PP} 2 --micro-batch-size 2"),
    "PP 2, DP 2, no losses but one dispatcher": (4, f"{PP} 2 --moe-token-dispatcher-type allgather"),
    "PP 2, DP 4, two groups": (8, f"{PP} 2"),
}


@pytest.fixture(scope="module")
def routed(pool, tmp_path_factory) -> Routed:
    model = f"{' '.join(MOE)} {ALL_LOSSES} --moe-token-dispatcher-type alltoall {SHORT}"
    return Routed(pool, tmp_path_factory.mktemp("whole"), model)


@pytest.mark.parametrize(
    ("layout", "loss"),
    sampled(itertools.product(WHOLE, ("", PER_TOKEN)), ("PP 2, DP 2", "")),
)
def test_whole_micro_batches_equal_one_rank(routed, tmp_path, layout, loss):
    """With the losses of routers that are of Megatron-LM's micro-batches and samples, as logged, too."""
    ranks, flags = WHOLE[layout]
    size = "--micro-batch-size 2" if "--micro-batch-size 2" in flags else ""
    found = routed.logged(ranks, f"{DEALT} {flags} {loss} --balance-report {tmp_path}", groups="groups" in layout)
    assert_alike(found, routed.logged(1, f"{ENDS} {loss} {size}"))
    spread = _dealt(tmp_path)
    assert spread
    before, after = (np.mean([line[f"micro_batch_step_{when}"] for line in spread]) for when in ("before", "after"))
    assert after < before


def _unused() -> tuple[Any, ...]:
    """A cluster, a model and costs of steps, where a test has costs of its own."""
    from balancing.cluster import Cluster
    from balancing.pipeline import MEGATRON_DEFAULTS
    from balancing.sequences import AttentionShape
    from megatron.balanced.sequences.micro_batch_schedule import StepSeconds

    return Cluster.preset("h200-8x400g"), AttentionShape(64, 4, 4, 2, 128), StepSeconds(1, 1, MEGATRON_DEFAULTS)


def _whole_steps() -> None:
    from balancing.sequences import deal_whole
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.micro_batch_schedule import WholeSteps

    def areas(indices: np.ndarray) -> np.ndarray:
        return (indices * 7919 % 101) ** 2

    class Whole(WholeSteps):
        def deal(self, seconds: np.ndarray) -> np.ndarray:
            return deal_whole(seconds, self.micro_batches)

    micro_batches, unused = 3, _unused()
    # Data-parallel ranks, samples of each in a micro-batch, groups; a domain of context-parallel ranks alone last.
    for ranks, size, groups, shared in ((4, 1, 1, True), (4, 2, 1, True), (6, 2, 3, True), (3, 2, 1, False)):
        first, each = 5, ranks * size
        steps = Whole(micro_batches, micro_batches * each, first, *unused)
        for begin in (first, first + micro_batches * each):
            run: dict[tuple[int, int], list[int]] = {}
            costs = np.zeros(micro_batches)
            for rank in range(ranks):
                members = ranks // groups
                domain = Domain(rank % members, members, rank % members, members, rank // members, groups)
                domain = domain if shared else Domain(0, 1)
                for number in range(micro_batches):
                    start = begin + number * each + rank * size
                    samples = steps.of(range(start, start + size), domain, areas)[number]
                    indices = [sample.index for sample in samples]
                    place = (rank if not shared else rank // members), number
                    assert run.setdefault(place, indices) == indices, "ranks of a group agree"
                    for at in range(0, len(samples), size):
                        part = samples[at : at + size]
                        assert [sample.index - part[0].index for sample in part] == list(range(size))
                        assert (part[0].index - begin) % size == 0, "a micro-batch of Megatron-LM stays together"
                        assert len({sample.origin for sample in part}) == 1
                    origins = [sample.origin for sample in samples]
                    assert origins == sorted(origins) and len(set(origins)) * size == len(samples)
                    assert indices == sorted(indices), "origins are in Megatron-LM's order"
            for (_, number), indices in run.items():
                costs[number] += areas(np.array(indices)).sum()
            together = sorted(index for indices in run.values() for index in indices)
            assert together == list(range(begin, begin + micro_batches * each)), "each sample once in its step"
            drawn = areas(np.arange(begin, begin + micro_batches * each)).reshape(micro_batches, -1).sum(1)
            if shared:
                assert costs.max() < drawn.max()
                assert costs.argmax() == 1, "the most expensive one runs in the middle"
        unread = steps.of(range(first + each, first + each + size), Domain(0, 2, 0, ranks), lambda indices: None)[1]
        assert [sample.index for sample in unread] == list(range(first + each, first + 2 * each)), "as drawn"
        assert [sample.origin // ranks for sample in unread] == [1] * each


def _dealt_for_a_pipeline() -> float:
    """Seconds of a step of dealt documents on four stages, over that of equal micro-batches."""
    from balancing.cluster import Cluster
    from balancing.pipeline import MEGATRON_DEFAULTS
    from balancing.sequences import AttentionShape
    from balancing.sequences.micro_batches import document_seconds
    from megatron.balanced.sequences.micro_batch_schedule import Steps, StepSeconds

    lengths = np.random.default_rng(0).integers(64, 1024, 160)
    cluster, shape = Cluster.preset("h200-8x400g").relabel(1, 4), AttentionShape(64, 4, 4, 2, 128)
    step = StepSeconds(stages=4, chunks=1, schedule=MEGATRON_DEFAULTS)
    steps = Steps(8, 8, 0, cluster, shape, step, token_capacity=int(lengths.sum() / 8 / 4 * 1.25))
    deal = steps.deal(lengths.tolist(), np.arange(160) // 20)
    costs = np.bincount(deal, document_seconds(lengths, cluster, shape), 8)
    return step(costs) / step(np.full(8, costs.mean()))


def test_micro_batches_fill_and_drain_the_pipeline_quickly(pool):
    assert pool.run(1, _dealt_for_a_pipeline)[0] < 0.96


def test_whole_micro_batches_are_dealt_once(pool):
    pool.run(1, _whole_steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["", PER_TOKEN])
def test_dealt_steps_with_experts(pool, tmp_path, loss):
    """Replicas of experts beside, which follow the tokens of each micro-batch."""
    experts = Packed(pool, tmp_path, f"{' '.join(MOE)} --moe-token-dispatcher-type alltoall {SHORT}")
    flags = f"{PP} 2 --expert-model-parallel-size 2 --balance-experts {settings('experts', min_gain=0)}"
    assert_close(experts.train(4, f"{DEALT} {flags} {loss}"), experts.train(1, f"{ENDS} {loss}"))


def _train_rank_with_counts(argv: list[str]) -> tuple[RankRun, list[Any]]:
    """Returns also, for each step, tokens [layer of the stage, expert] on all ranks that expert biases follow."""
    import importlib

    # A function of the package has the module's name.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    counted: list[Any] = []
    update = finalize_model_grads.get_updated_expert_bias

    def kept(tokens_per_expert: Any, *args: Any, **kwargs: Any) -> Any:
        found = update(tokens_per_expert, *args, **kwargs)  # which adds them up over ranks in place
        counted.append(tokens_per_expert.tolist())
        return found

    finalize_model_grads.get_updated_expert_bias = kept
    return train_rank(argv, True), counted


@pytest.mark.exhaustive
def test_expert_bias_of_dealt_steps(pool, tmp_path):
    """Rows that make the ranks of a micro-batch equally long count for no expert."""
    flags = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall"
    experts = Packed(pool, tmp_path, f"{' '.join(MOE)} {flags} {SHORT}")
    dealt = pool.run(4, _train_rank_with_counts, experts.from_start(f"{DEALT} {PP} 2 {CP} 2"))
    alone = pool.run(1, _train_rank_with_counts, experts.from_start(ENDS))
    assert_close(join([run for run, _ in dealt]), join([run for run, _ in alone]))
    (_, first), _, (_, second), _ = dealt
    ((_, expected),) = alone
    assert len(expected) == 2
    assert [[*stage, *other] for stage, other in zip(first, second, strict=True)] == expected


@pytest.mark.exhaustive
def test_validation_and_restart_of_dealt_steps(packed, tmp_path):
    """Validation has its documents where they were drawn; a run goes on in the middle of the samples, without the flag
    before, and with it after."""
    packed.base[packed.base.index("100,0,0")] = "80,20,0"
    flags = "--eval-interval 1 --eval-iters 1"
    try:
        reference = packed.train(1, f"{ENDS} {flags}")
        run = packed.train(4, f"{DEALT} {flags} {PP} 2 {CP} 2")
        first = packed.from_start(f"{ENDS} {PP} 2 --train-iters 1 --save {tmp_path} --save-interval 1")
        train(packed.pool, 2, base=first)
        rest = train(
            packed.pool,
            2,
            base=packed.whole(f"{DEALT} {PP} 2 --load {tmp_path} --override-opt-param-scheduler"),
            parameters=True,
        )
    finally:
        packed.base[packed.base.index("80,20,0")] = "100,0,0"
    assert_close(run, reference)
    np.testing.assert_allclose(run.validation, reference.validation, rtol=1e-6)  # which Megatron sums in float32
    assert_close(Run(reference.losses[:1] + rest.losses, [], [], rest.parameters), reference)


REFUSED = {
    "growing steps": ("--rampup-batch-size 4 4 16 --train-samples 64", "--rampup-batch-size 4 4 16", "have one size"),
    "a loss of the step so far": (
        f"{' '.join(MOE)} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
        "--moe-router-load-balancing-type global_aux_loss",
        "whose order changes",
    ),
}
IDLE = {
    "--pipeline-model-parallel-size 1 --context-parallel-size 2": "without a pipeline no stage waits",
    "--global-batch-size 1": "a step has one micro-batch",
}


PIPELINE = [*MODEL, *MOCK_DATA, PACKED, "--attention-dropout", "0", PP, "2", "--sequence-micro-batches"]


def test_steps_that_cannot_be_dealt(pool):
    assert_refused(pool, [*PIPELINE, "--balance-sequences"], REFUSED)
    assert_refused(pool, PIPELINE, {"alone": ("", "--sequence-micro-batches does nothing", "--balance-sequences")})


def test_steps_with_nothing_to_deal(pool):
    assert_accepted(pool, [*PIPELINE, "--balance-sequences"], [*IDLE, "--sequence-domain context"])
    for why in IDLE.values():
        assert any(f"--sequence-micro-batches has nothing to balance: {why}" in output for output in pool.output)


def _examples() -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Places of rank 0's tokens, and samples with their origins by micro-batch, as `_places` and `WholeSteps` say."""
    from balancing.sequences.sequence_plan import SequencePlan, Shard
    from megatron.balanced.sequences.dataset import _Document, _packed_tokens, _places
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.micro_batch_schedule import WholeSteps

    documents = [_Document(0, 0, 3), _Document(0, 3, 1), _Document(1, 0, 4)]
    shards = Shard(0, 0, 3, 0), Shard(2, 0, 1, 0), Shard(1, 0, 1, 1), Shard(2, 1, 4, 1)
    plan = SequencePlan((3, 1, 4), 2, "example", shards, shards, ("local", "local", "gather"))
    packed = _packed_tokens(plan, 0)
    places = [part.tolist() for part in (packed, *_places(documents, packed))]

    class Whole(WholeSteps):
        def deal(self, seconds: np.ndarray) -> np.ndarray:
            return np.array([0, 1, 0, 1])

    steps = Whole(2, 8, 0, *_unused())
    of = steps.of([6, 7], Domain(1, 2, 1, 2), lambda samples: np.ones(len(samples)))
    return places, [[(sample.index, sample.origin) for sample in samples] for samples in of]


def test_examples_of_index_maps(pool):
    ((places, samples),) = pool.run(1, _examples)
    assert places == [[0, 1, 2, 4], [0, 0, 0, 1], [0, 1, 2, 0], [3, 3, 3, 4]]
    assert samples == [[(0, 0), (1, 0), (4, 2), (5, 2)], [(2, 1), (3, 1), (6, 3), (7, 3)]]
