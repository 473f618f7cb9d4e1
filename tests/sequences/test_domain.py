"""Micro-batches that data-parallel ranks share (`--sequence-domain data`) train the same model as on one rank.

The reference is Megatron-LM on one rank, which has the same micro-batches one after another. Ends of documents have no
loss here, so micro-batches have unequal numbers of losses, and without --calculate-per-token-loss a token counts more
in one than in another.
"""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_packed_documents import PACKED, PP, SP, Packed
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.events import events_in
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import MOE, RankRun, Run, assert_close, differences, join, train, train_rank

CP, EP = "--context-parallel-size", "--expert-model-parallel-size"
ENDS = f"{PACKED} --eod-mask-loss"
BALANCED = f"{ENDS} --balance-sequences"
SHARED = f"{BALANCED} --sequence-domain data"
PER_TOKEN = "--calculate-per-token-loss"
SHORT = "--global-batch-size 4 --train-iters 3"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"

# ranks, flags
LAYOUTS = {
    "DP 4": (4, ""),
    "DP 2, CP 2, both overlaps, small buckets": (4, f"{CP} 2 {OVERLAPS}"),
    "DP 2, TP 2, sequence parallel": (4, SP),
    "DP 2, PP 2, interleaved": (4, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "DP 2, CP 2, PP 2": (8, f"{CP} 2 {PP} 2 {settings('sequences', planner='zones')}"),
    "DP 4, two optimizers": (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    "DP 4, rings": (4, f"{settings('sequences', planner='ring')} --num-workers 1"),
    "DP 2, full recompute": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "CP 2 alone": (2, f"{CP} 2 --sequence-domain context"),
    "DP 2, CP 2 alone": (4, f"{CP} 2 --sequence-domain context"),
}
FIRST = "DP 2, CP 2, both overlaps, small buckets"


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("domain"), SHORT)


@pytest.mark.parametrize(
    ("layout", "loss"),
    sampled(itertools.product(LAYOUTS, ("", PER_TOKEN)), (FIRST, "")),
)
def test_shared_micro_batches_equal_one_rank(packed, layout, loss):
    ranks, flags = LAYOUTS[layout]
    assert_close(packed.train(ranks, f"{SHARED} {flags} {loss}"), packed.alone(f"{ENDS} {loss}"))


def _on_nodes(argv: list[str], per_node: int) -> tuple[RankRun, str]:
    """One rank of a run, and the cluster that its stage plans for."""
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    from megatron.balanced.sequences.balancer import SequenceBalancer

    clusters, begin = [], SequenceBalancer.begin_schedule

    def begin_schedule(balancer: Any) -> None:
        clusters.append(repr(balancer._sharing.cluster))
        begin(balancer)

    SequenceBalancer.begin_schedule = begin_schedule
    return train_rank(argv, True), clusters[0]


def test_stages_that_lie_on_nodes_unlike_have_one_plan(packed):
    """Two ranks of a stage are on one node at the ends of the pipeline, and on two nodes in the middle."""
    layout = f"{PP} 3 --pipeline-model-parallel-layout E|tttt|L"
    argv = packed.from_start(f"{SHARED} {layout}")
    ranks = packed.pool.run(6, _on_nodes, argv, 3)
    assert len({cluster for _, cluster in ranks}) == 1
    assert_close(join([run for run, _ in ranks]), packed.alone(ENDS))


def _have_groups(members: int = 2) -> None:
    """Have a domain consist of groups with so few data-parallel ranks."""
    from balancing.sequences.planners import groups

    groups._MEMBERS = members


def _train_in_groups(argv: list[str], members: int) -> RankRun:
    _have_groups(members)
    return train_rank(argv, True)


@pytest.mark.parametrize(
    ("ranks", "flags", "members"),
    [
        (4, "", 2),
        pytest.param(4, f"--micro-batch-size 2 {PER_TOKEN} --global-batch-size 8", 2, marks=pytest.mark.exhaustive),
        pytest.param(8, f"{CP} 2 {PP} 2 --num-workers 1", 1, marks=pytest.mark.exhaustive),
        pytest.param(8, f"{PP} 2 --sequence-micro-batches --global-batch-size 16", 2, marks=pytest.mark.exhaustive),
        pytest.param(8, f"{CP} 2 {OVERLAPS} --balance-report {{}}", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_groups_of_a_large_domain_equal_one_rank(packed, tmp_path, ranks, flags, members):
    """Each group has micro-batches that are drawn anywhere in the domain."""
    flags = flags.format(tmp_path)
    loss = " ".join(flag for flag in (PER_TOKEN, "--micro-batch-size 2") if flag in flags)
    batch = next((f"--global-batch-size {size}" for size in (8, 16) if f"--global-batch-size {size}" in flags), "")
    run = join(packed.pool.run(ranks, _train_in_groups, packed.from_start(f"{SHARED} {flags}"), members))
    assert_close(run, packed.alone(f"{ENDS} {loss} {batch}"))


@pytest.mark.exhaustive
def test_the_losses_differ(packed):
    """So that the tests above tell one way to weigh tokens from the other."""
    _, parameters = differences(packed.alone(ENDS), packed.alone(f"{ENDS} {PER_TOKEN}"))
    assert parameters > 1e-9


@pytest.mark.exhaustive
def test_micro_batches_of_two_and_validation(packed):
    """With PP 2; validation is of forward passes alone, in micro-batches of their own size."""
    packed.base[packed.base.index("100,0,0")] = "80,20,0"
    flags = "--eval-interval 2 --eval-iters 2 --train-iters 2 --micro-batch-size 2 --eval-micro-batch-size 1"
    try:
        reference = packed.train(1, f"{ENDS} {flags} --eval-global-batch-size 4")
        run = packed.train(4, f"{SHARED} {flags} --eval-global-batch-size 4 {PP} 2")
    finally:
        packed.base[packed.base.index("80,20,0")] = "100,0,0"
    assert_close(run, reference)
    assert len(run.validation) == len(reference.validation) >= 1
    np.testing.assert_allclose(run.validation, reference.validation, rtol=1e-6)  # which Megatron sums in float32


@pytest.mark.exhaustive
def test_consumed_samples_are_megatrons(packed, tmp_path):
    """A run goes on where another domain, or none, has stopped."""
    packed.train(4, f"{SHARED} --save {tmp_path} --save-interval 1")
    later = packed.whole(f"{BALANCED} {CP} 2 --load {tmp_path} --ckpt-step 1")
    rest, reference = train(packed.pool, 4, base=later, parameters=True), packed.alone(ENDS)
    assert_close(replace(rest, losses=reference.losses[:1] + rest.losses), reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["", PER_TOKEN])
@pytest.mark.parametrize(
    "routers",
    [
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ],
    ids=["losses", "expert bias"],
)
def test_experts_of_shared_micro_batches(pool, tmp_path, routers, loss):
    """Expert parallelism folded into data parallelism, balanced as well, with the losses and the bias that routers sum
    over all ranks. The reference has as many ranks, since the loss over all of them depends on their number."""
    model = f"{' '.join(MOE)} {routers} --moe-token-dispatcher-type alltoall --global-batch-size 8 --train-iters 3"
    experts = Packed(pool, tmp_path, model)
    shared, alone = f"{SHARED} {loss} {EP} 2", f"{ENDS} {loss} {EP} 2"
    assert_close(
        experts.train(4, f"{shared} --balance-experts {settings('experts', min_gain=0)}"), experts.train(4, alone)
    )
    assert_close(experts.train(4, f"{shared} {CP} 2"), experts.train(2, alone))


# Losses of routers that look at a micro-batch or a sample.


# By sigmoid, since Megatron-LM takes the softmax of scores in float32 always.
OF_SAMPLES = (
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-1 2e-1 "
    "--moe-router-score-function sigmoid"
)
MODULES = "--recompute-granularity selective --recompute-modules"
# ranks, flags
ROUTED = {
    "DP 2, EP 2": (2, f"{EP} 2"),
    "DP 4, EP 2, balanced": (4, f"{EP} 2 --balance-experts {settings('experts', min_gain=0)}"),
    "DP 2, CP 2, EP 4": (4, f"{CP} 2 {EP} 4"),
    "DP 2, PP 2, EP 2": (4, f"{PP} 2 {EP} 2"),
    "DP 2, PP 2, interleaved": (4, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "DP 2, TP 2, sequence parallel": (4, SP),
    "DP 2, micro-batches of two": (2, "--micro-batch-size 2"),
    "CP 2 alone, micro-batches of two": (2, f"{CP} 2 --sequence-domain context --micro-batch-size 2"),
    "DP 2, CP 2 alone, micro-batches of two": (4, f"{CP} 2 --sequence-domain context --micro-batch-size 2"),
    "DP 4, two optimizers": (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
    "DP 2, PP 2, experts recomputed": (4, f"{PP} 2 {MODULES} moe"),
    "DP 2, PP 2, attention recomputed": (4, f"{PP} 2 {MODULES} core_attn"),
    "DP 2, full recompute": (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    "DP 2, EP 2, messages overlapped": (2, f"{EP} 2 --overlap-moe-expert-parallel-comm"),
}


def _train_rank_with_figures(argv: list[str], groups: bool, plans: Plans) -> tuple[RankRun, list[dict[str, float]]]:
    """Returns also the losses of routers that each step logs, in float64. groups: whether domains have some."""
    import torch
    from megatron.core.transformer.moe.moe_logging import MetricEntry, MoEMetricsTracker

    if groups:
        _have_groups()
    if plans:
        move_at(plans)
    logged: list[dict[str, float]] = []
    aggregate, record = MoEMetricsTracker._aggregate, MoEMetricsTracker.record

    def initialize(self: Any, name: str, num_layers: int, device: Any = None) -> None:
        self._metrics.setdefault(name, MetricEntry(values=torch.zeros(num_layers, dtype=torch.float64)))

    def recorded(
        self: Any, name: str, value: Any, layer_number: int, num_layers: int, *groups: Any, **named: Any
    ) -> None:
        initialize(self, name, num_layers)
        record(self, name, value, layer_number, num_layers, *groups, **named)

    def kept(self: Any, *args: Any, **named: Any) -> Any:
        found = aggregate(self, *args, **named)
        logged.append({name: float(value) for name, value in found.items()})
        return found

    MoEMetricsTracker.record, MoEMetricsTracker.ensure_initialized = recorded, initialize
    MoEMetricsTracker._aggregate = kept
    return train_rank(argv, True), logged


class Routed(Packed):
    """A model with experts, and the figures that its steps log."""

    @functools.cache  # noqa: B019
    def logged(
        self, ranks: int, flags: str, groups: bool = False, plans: tuple[Any, ...] = ()
    ) -> tuple[Run, list[dict[str, float]]]:
        runs = self.pool.run(ranks, _train_rank_with_figures, self.from_start(flags), groups, dict(plans))
        figures = runs[-1][1]
        assert len(figures) >= 2 and all(set(step) == set(figures[0]) for step in figures)
        return join([run for run, _ in runs]), figures


Logged = tuple[Run, list[dict[str, float]]]


def assert_alike(found: Logged, expected: Logged) -> None:
    """Losses, parameters, and what each step logs of routers."""
    assert_close(found[0], expected[0])
    for step, alone in zip(found[1], expected[1], strict=True):
        assert step == pytest.approx(alone, rel=1e-12)


@pytest.fixture(scope="module")
def routed(pool, tmp_path_factory) -> Routed:
    model = f"{' '.join(MOE)} {OF_SAMPLES} --moe-token-dispatcher-type alltoall --global-batch-size 4 --train-iters 2"
    return Routed(pool, tmp_path_factory.mktemp("routed"), model)


@pytest.mark.parametrize(
    ("layout", "loss"),
    sampled(itertools.product(ROUTED, ("", PER_TOKEN)), ("DP 2, EP 2", "")),
)
def test_losses_of_routers_are_those_of_samples(routed, layout, loss):
    """Over the tokens of each micro-batch and of each sample, wherever the domain has them; and so they are logged."""
    ranks, flags = ROUTED[layout]
    size = "--micro-batch-size 2" if "--micro-batch-size 2" in flags else ""
    run, figures = routed.logged(ranks, f"{SHARED} {flags} {loss}")
    reference, expected = routed.logged(1, f"{ENDS} {loss} {size}")
    assert {*expected[0]} == {"load_balancing_loss", "seq_load_balancing_loss"}
    assert_alike((run, figures), (reference, expected))


@pytest.mark.parametrize("loss", ["", pytest.param(PER_TOKEN, marks=pytest.mark.exhaustive)])
def test_losses_of_samples_that_ranks_have_parts_of(routed, loss):
    """Without balancing, and as they are logged."""
    flags = f"{ENDS} {loss} --micro-batch-size 2"
    assert_alike(routed.logged(4, f"{flags} {SP}"), routed.logged(1, flags))


@pytest.fixture(scope="module")
def dense_last(pool, tmp_path_factory) -> Routed:
    kinds = (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-1 2e-1 1e-1 "
        "--moe-router-score-function sigmoid --moe-z-loss-coeff 1e-2 --moe-layer-freq [1]*3+[0]*1 "
        "--moe-token-dispatcher-type alltoall --global-batch-size 4 --train-iters 2"
    )
    return Routed(pool, tmp_path_factory.mktemp("dense_last"), f"{' '.join(MOE)} {kinds}")


@pytest.mark.parametrize(
    ("ranks", "flags", "plans"),
    [
        (4, f"{SP} {PP} 2 --decoder-last-pipeline-num-layers 1", {}),
        (4, f"{SP} {PP} 2 --balance-layers", {1: ((3,), (1,))}),  # the last stage loses its layers with experts
        pytest.param(8, f"{SP} {PP} 2 --decoder-last-pipeline-num-layers 1", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_last_stage_without_experts_logs_what_all_ranks_have(dense_last, ranks, flags, plans):
    assert_alike(dense_last.logged(ranks, flags, plans=tuple(plans.items())), dense_last.logged(1, ""))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "flags"), [(4, f"{EP} 2"), (8, f"{SP} {EP} 2 --expert-tensor-parallel-size 1")])
def test_losses_of_routers_in_groups(routed, ranks, flags):
    """Of a large domain each group counts the tokens of its own samples."""
    assert_alike(routed.logged(ranks, f"{SHARED} {flags}", groups=True), routed.logged(1, ENDS))


@pytest.mark.exhaustive
def test_samples_that_are_one_document_each(routed):
    """Without boundaries Megatron-LM keeps the samples of a micro-batch apart, and balanced sequences pack them."""
    reference = routed.logged(1, "--micro-batch-size 2")
    for domain in ("context", "data"):
        spread = f"--micro-batch-size 2 --balance-sequences {CP} 2 --sequence-domain {domain}"
        assert_alike(routed.logged(4, spread), reference)


@pytest.mark.exhaustive
def test_losses_of_samples_and_of_micro_batches_differ(routed):
    """So that the tests above tell one from the other: of each sample, of each micro-batch, and of a larger one."""
    kinds = [
        f"--micro-batch-size {size} --moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 1e-1"
        for size, kind in ((1, "aux_loss"), (2, "aux_loss"), (2, "seq_aux_loss"))
    ]
    runs = [routed.train(1, f"{PACKED} {flags}") for flags in kinds]
    for run, other in ((runs[0], runs[1]), (runs[1], runs[2])):
        assert differences(run, other)[1] > 1e-9
    assert_close(runs[2], runs[0])


def test_report_of_shared_micro_batches(packed, tmp_path):
    """Data-parallel ranks alone have unequal documents before, and equal work after."""
    packed.train(4, f"{SHARED} --train-iters 2 {settings('sequences', chunk=4)} --balance-report {tmp_path}")
    lines = events_in(tmp_path)
    spread = [line for line in lines if line["balancer"] == "sequences" and line["action"] == "spread"]
    assert [line["iteration"] for line in spread] == [1, 2], "one line for all data-parallel ranks"
    for line in spread:
        assert len(line["ordered_before"]) == 4 and line["micro_batches"] == 1
        assert line["imbalance_after"] < line["imbalance_before"]
        assert line["token_imbalance"] == 1.0
    ranks = [line for line in lines if line["balancer"] == "sequences" and line["unit"] == "rank"]
    assert ranks and all(line["token_imbalance"] == 1.0 for line in ranks)


# Samples.


def _samples_of_samplers() -> None:
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    from megatron.balanced.sequences.domain import Domain

    def areas(indices: np.ndarray) -> np.ndarray:
        return indices * 7919 % 101

    for origins, size, consumed, groups in ((1, 3, 0, 1), (2, 1, 0, 1), (3, 2, 6, 1), (4, 3, 5, 1), (4, 3, 5, 2)):
        samplers = [MegatronPretrainingSampler(60, consumed, size, origin, origins) for origin in range(origins)]
        whole = iter(MegatronPretrainingSampler(60, consumed, size * origins, 0, 1))
        each = origins // groups  # of a group
        domains = [
            Domain(rank % (2 * each), 2 * each, rank // 2 % each, each, rank // (2 * each), groups)
            for rank in range(2 * origins)
        ]
        for number, parts in enumerate(zip(*samplers, strict=True)):
            together, of_group = next(whole), {}
            for rank, domain in enumerate(domains):
                shared = domain.samples(parts[rank // 2], areas)
                indices = [sample.index for sample in shared]
                assert of_group.setdefault(domain.group, indices) == indices, "ranks of a group agree"
                assert len(indices) == each * size and indices == sorted(indices)
                for origin in range(each):
                    own = [sample.index for sample in shared if sample.origin == origin]
                    assert own in [list(part) for part in parts], "a micro-batch of Megatron-LM stays together"
            assert sorted(index for own in of_group.values() for index in own) == together, (number, groups)
            unread = domains[-1].samples(parts[-1], lambda indices: None)
            assert [sample.index for sample in unread] == together[-each * size :], "their own, where no index tells"
        assert number >= 3


def test_ranks_know_the_samples_of_the_others(pool):
    pool.run(1, _samples_of_samplers)


class _Tokenizer:
    vocab_size, eod, pad = 127, 126, 125

    def __init__(self) -> None:
        self.unique_identifiers: dict[str, str] = {}


def _datasets(folder: Path) -> dict[str, Any]:
    """Training and validation sets of every kind, with samples of 64 tokens."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    files = []
    for seed in (1, 2):
        files.append(str(folder / f"documents{seed}"))
        write_documents(Path(files[-1]), heavy_tailed(400, seed=seed))
    kinds: dict[str, tuple[type, Any, dict[str, Any]]] = {
        "documents": (GPTDataset, ([files[0]], None), {}),
        "blend": (GPTDataset, (files, [0.3, 0.7]), {}),
        "mock": (MockGPTDataset, None, {}),
        "samples": (GPTDataset, ([files[0]], None), {"inter_document_masking": False}),
        "positions": (GPTDataset, ([files[0]], None), {"inter_document_masking": False, "reset_position_ids": True}),
        "whole validation set": (GPTDataset, ([files[0]], None), {"drop_last_partial_validation_sequence": False}),
    }
    found = {}
    for kind, (cls, blend, options) in kinds.items():
        config = GPTDatasetConfig(
            **{
                "random_seed": 1, "sequence_length": 64, "blend": blend, "split": "70,30,0", "tokenizer": _Tokenizer(),
                "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": True,
                "create_attention_mask": False, "inter_document_masking": True, "path_to_cache": str(folder / kind),
                **options,
            }
        )  # fmt: skip
        sizes = [24, None if kind == "whole validation set" else 8, 0]
        train, valid, _ = BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()
        found |= {kind: train, f"{kind}, validation": valid}
    return found


def _check_lengths(folder: Path) -> dict[str, int]:
    """Dataset -> samples compared."""
    import torch

    from megatron.balanced.sequences.dataset import _lengths, document_lengths, read_tokens, sample_areas

    random, compared = np.random.default_rng(0), {}
    for kind, dataset in _datasets(folder).items():
        compared[kind] = min(len(dataset), 40)
        indices = np.arange(len(dataset) - compared[kind], len(dataset))
        areas = [sum(length * (length + 1) // 2 for length in document_lengths(dataset, at)) for at in indices.tolist()]
        assert sample_areas(dataset, indices).tolist() == areas, kind
        for index in range(len(dataset) - compared[kind], len(dataset)):
            whole = dataset[index]
            assert document_lengths(dataset, index) == _lengths(whole, 64), (kind, index)
            tokens = np.sort(random.choice(64, random.integers(1, 40), replace=False))
            part = read_tokens(dataset, index, tokens)
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(part[name][tokens], whole[name][tokens]), (kind, index, name)
    return compared


def test_lengths_and_parts_are_those_of_whole_samples(pool, tmp_path):
    (compared,) = pool.run(1, _check_lengths, tmp_path)
    assert len(compared) == 12 and min(compared.values()) >= 2


def _read(folder: Path, method: str) -> tuple[list[int], list[int], int, int]:
    """Tokens that each rank read, tokens that it has, tokens of the micro-batches, and cuts of documents."""
    import pickle

    import torch

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.sequences.dataset import PlannedDataset, Rows
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.moved_tokens import row_origins
    from megatron.balanced.sequences.planner import Planner

    dataset = _datasets(folder)["documents"]
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=4)
    shape = AttentionShape(32, 4, 4, 2, 64)
    planner = Planner(SequenceConfig(enabled=True, planner=method, chunk=4), cluster, 0, shape)
    get, read, held, cuts = dataset.dataset.get, [0] * 4, [0] * 4, 0
    for first in (0, 8):
        whole = [dataset[index] for index in range(first, first + 8)]
        rows: list[dict[str, torch.Tensor]] = []
        for rank in range(4):

            def counted(*args: Any, rank: int = rank, **kwargs: Any) -> np.ndarray:
                tokens = get(*args, **kwargs)
                read[rank] += len(tokens)
                return tokens

            dataset.dataset.get = counted
            planned = PlannedDataset(
                dataset, replace(planner, rank=rank), Domain(rank, 4, rank, 4), Rows(4, 1, True), None
            )
            (batch,) = planned.__getitems__([first + 2 * rank, first + 2 * rank + 1])
            dataset.dataset.get = get
            plan, _, origins, _ = pickle.loads(batch.pop("plan"))
            cuts += len(plan.shards(rank, linear=True))
            held[rank] += int(plan.linear_tokens[rank])
            batch["origin"] = torch.from_numpy(row_origins(plan, rank, len(batch["tokens"]), origins))
            del batch["plan_ms"]
            rows.append(batch)
        expected = [{**sample, "origin": torch.full((64,), at // 2)} for at, sample in enumerate(whole)]
        names = ("tokens", "labels", "loss_mask", "position_ids", "origin")
        ours, theirs = (
            sorted(zip(*(torch.cat([part[name] for part in parts]).tolist() for name in names), strict=True))
            for parts in (rows, expected)
        )
        assert ours == theirs, "every token once, with its own label, position and origin"
    return read, held, 2 * 8 * 64, cuts


@pytest.mark.parametrize("method", ["chunks", "zones"])
def test_a_rank_reads_its_own_tokens(pool, tmp_path, method):
    """And one more for each of its pieces, the last label."""
    ((read, held, total, cuts),) = pool.run(1, _read, tmp_path, method)
    assert sum(held) == total
    assert all(total / 4 <= own for own in held)
    assert all(own <= tokens <= own + cuts for tokens, own in zip(read, held, strict=True))
    assert sum(read) <= total + cuts < 1.5 * total


# Weights.


def _weights(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Masks [row], origins [row] and weights [row] of this rank, where tokens of 3 micro-batches are at random."""
    import os

    import torch
    import torch.distributed as dist

    from megatron.balanced.sequences.domain import LossTokens

    dist.init_process_group("gloo")
    random = np.random.default_rng([seed, int(os.environ["RANK"])])
    mask, origin = random.integers(0, 2, 40), random.integers(0, 2 + 2 * (seed > 0), 40)
    mask[origin == 1] = 0  # a micro-batch without any loss
    tokens = LossTokens(torch.tensor(origin), 5, dist.group.WORLD)
    weights = tokens.weights(torch.tensor(mask, dtype=torch.float64))
    return mask, origin, weights.numpy()


@pytest.mark.parametrize("seed", [0, 1])
def test_micro_batches_count_alike(pool, seed):
    """Whatever the number of their tokens: the weights of each add up to one, unless it has no loss."""
    mask, origin, weights = (np.concatenate(each) for each in zip(*pool.run(2, _weights, seed), strict=True))
    assert not weights[mask == 0].any()
    for each in range(5):
        own = weights[(origin == each) & (mask == 1)]
        assert own.sum() == pytest.approx(1 if len(own) else 0, rel=1e-12)
        assert len(set(own)) <= 1
