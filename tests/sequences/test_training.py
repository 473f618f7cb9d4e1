"""Documents spread over context-parallel ranks train the same model as one rank that has them all, in every layout.

The reference is Megatron's own packed documents at context parallelism 1, which `test_packed_documents` compares with
dense masks. Documents' last tokens have no loss here, so ranks of equal tokens have unequal numbers of losses.
"""

from typing import Any

import numpy as np
import pytest
import torch

from balancing.report.history import read_history
from balancing.report.summary import summarize
from balancing_tools.report.page import page
from tests.layers.test_release import _train as _train_moving
from tests.sequences.test_packed_documents import PACKED, PP, SP, Packed
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import (
    MODEL,
    MOE,
    RankRun,
    Run,
    assert_close,
    assert_same,
    differences,
    join,
    train,
    train_rank,
)

CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
LOSS = f"{PACKED} --calculate-per-token-loss --eod-mask-loss"
BALANCED = f"{LOSS} --balance-sequences"
SHORT = "--global-batch-size 4 --train-iters 3"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

# ranks, flags
LAYOUTS = {
    "CP 2": (2, f"{CP} 2"),
    "CP 4": (4, f"{CP} 4"),
    "CP 2, PP 4": (8, f"{CP} 2 {PP} 4"),
    "CP 2, PP 2, micro-batches of two": (4, f"{CP} 2 {PP} 2 --micro-batch-size 2"),
    "CP 2, PP 2, interleaved": (4, f"{CP} 2 {PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "CP 2, TP 2, sequence parallel": (4, f"{CP} 2 {SP}"),
    "CP 2, DP 2, both overlaps": (4, f"{CP} 2 {OVERLAPS}"),
    "CP 2, full recompute": (
        2,
        f"{CP} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "CP 2, recomputed attention": (
        2,
        f"{CP} 2 --recompute-granularity selective --recompute-modules core_attn --micro-batch-size 2",
    ),
}
PLANNERS = ("chunks", "zones", "ring", "gather")


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("sequences"), SHORT)


@pytest.fixture(scope="module")
def alone(packed) -> Run:
    return packed.train(1, LOSS)


@pytest.mark.parametrize(
    "layout",
    sampled(
        LAYOUTS,
        "CP 2, PP 2, micro-batches of two",
        "CP 2, TP 2, sequence parallel",
        "CP 2, DP 2, both overlaps",
        "CP 2, recomputed attention",
    ),
)
def test_layouts_equal_one_rank(packed, alone, layout):
    world_size, flags = LAYOUTS[layout]
    assert_close(packed.train(world_size, f"{BALANCED} {flags}"), alone)


@pytest.mark.parametrize("planner", PLANNERS)
def test_planners_equal_one_rank(packed, alone, planner):
    """With chunks shorter than documents, and plans made in a loader's worker."""
    chunk = settings("sequences", chunk=4) if planner == "chunks" else ""
    flags = f"{CP} 4 {settings('sequences', planner=planner)} {chunk} --num-workers 1"
    assert_close(packed.train(4, f"{BALANCED} {flags}"), alone)


def test_repeats_bit_for_bit(packed):
    flags = f"{BALANCED} {CP} 2 {settings('sequences', planner='zones')}"
    assert_same(packed.train(2, flags), packed.train(2, flags))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_documents_with_experts(pool, tmp_path, dispatcher):
    """Balanced as well. Grouped queries and the losses of routers ride along."""
    losses = "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --group-query-attention --num-query-groups 2"
    experts = Packed(pool, tmp_path, f"{' '.join(MOE)} {losses} {SHORT} --moe-token-dispatcher-type {dispatcher}")
    flags = f"{CP} 2 {PP} 2 {EP} 2 --balance-experts {settings('experts', min_gain=0)}"
    assert_close(experts.train(4, f"{BALANCED} {flags}"), experts.train(1, LOSS))


@pytest.mark.exhaustive
def test_documents_while_messages_of_experts_are_overlapped(pool, tmp_path):
    """The forward pass of one micro-batch alternates with the backward pass of another, and each has its own plan."""
    experts = Packed(pool, tmp_path, f"{' '.join(MOE)} {SHORT} --moe-token-dispatcher-type alltoall")
    flags = f"{CP} 2 {EP} 2 --overlap-moe-expert-parallel-comm --balance-experts {settings('experts', min_gain=0)}"
    assert_close(experts.train(2, f"{BALANCED} {flags}"), experts.train(1, LOSS))


def test_samples_as_sequences(pool, tmp_path):
    """Without documents in the masks, each sample is one sequence, and learned positions count from its beginning."""
    samples = Packed(pool, tmp_path, f"--position-embedding-type learned_absolute --disable-bias-linear {SHORT}")
    reference = samples.train(1, "--calculate-per-token-loss")
    assert_close(samples.train(2, f"--balance-sequences {CP} 2 --micro-batch-size 2"), reference)


@pytest.mark.exhaustive
def test_norms_of_queries_and_keys(pool, tmp_path):
    """Each head of each token by itself, before anything is spread; with a head size that is not hidden / heads."""
    flags = "--qk-layernorm --normalization RMSNorm --group-query-attention --num-query-groups 2 --kv-channels 12"
    normed = Packed(pool, tmp_path, f"{flags} --disable-bias-linear {SHORT}")
    assert_close(
        normed.train(4, f"{BALANCED} {CP} 2 {SP} {settings('sequences', planner='zones')}"), normed.train(1, LOSS)
    )


@pytest.mark.exhaustive
def test_yarn(pool, tmp_path):
    """Its table is made in pinned memory where ranks share a sequence."""
    yarn = "--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-original-max-position-embeddings 16"
    stretched = Packed(pool, tmp_path, f"{yarn} --mscale 1.0 {SHORT}")
    reference = stretched.train(1, LOSS)
    assert_close(stretched.train(2, f"{BALANCED} {CP} 2"), reference)
    losses, _ = differences(stretched.train(1, f"{LOSS} --rotary-scaling-factor 1.0"), reference)
    assert losses > 1e-9, "the flags change nothing"


@pytest.mark.parametrize(
    ("softmax", "layout"),
    [
        ("learnable", f"{SP} {settings('sequences', planner='gather')}"),
        ("off-by-one", f"{PP} 2 {settings('sequences', planner='ring')}"),
    ],
)
@pytest.mark.exhaustive
def test_attention_sinks(pool, tmp_path, softmax, layout):
    """The sink of each head, whose gradient is that of the queries of all context-parallel ranks."""
    groups = "--group-query-attention --num-query-groups 2"
    sinks = Packed(pool, tmp_path, f"--softmax-type {softmax} {groups} {SHORT}")
    reference = sinks.train(1, LOSS)
    assert_close(sinks.train(4, f"{BALANCED} {CP} 2 {layout}"), reference)
    assert ("softmax_offset" in " ".join(reference.parameters)) == (softmax == "learnable")


@pytest.mark.parametrize(
    ("every", "layout"),
    [
        pytest.param(
            "--window-attn-skip-freq 2", f"{CP} 2 {PP} 2 {settings('sequences', planner='zones')}", id="zones"
        ),
        pytest.param("", f"{CP} 4 {settings('sequences', planner='ring')}", marks=pytest.mark.exhaustive, id="ring"),
    ],
)
def test_sliding_windows(pool, tmp_path, every, layout):
    """In every second layer, as GPT-OSS has them, with its sinks; and in all. Documents are longer than the window."""
    flags = f"--window-size 5,0 {every} --softmax-type learnable {SHORT}"
    windows = Packed(pool, tmp_path, flags)
    assert_close(windows.train(4, f"{BALANCED} {layout}"), windows.train(1, LOSS))


LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model",
    ["--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable", f"{LATENT} --disable-bias-linear"],
    ids=["windows and sinks", "multi-latent"],
)
def test_layers_of_another_attention_move(pool, tmp_path, model):
    """With their sinks and rotary embeddings; a layer keeps its window wherever it is."""
    moving = Packed(pool, tmp_path, f"{model} --global-batch-size 4 --train-iters 4")
    argv = moving.from_start(f"{BALANCED} {CP} 2 {PP} 2 --use-distributed-optimizer")
    run, _ = _train_moving(pool, 4, 4, "", {1: ((3,), (1,)), 2: ((1,), (3,))}, argv)
    assert_close(run, moving.train(1, LOSS))


def test_validation_of_spread_documents(packed):
    """Forward passes alone, whose schedule Megatron chooses elsewhere."""
    packed.base[packed.base.index("100,0,0")] = "80,20,0"
    try:
        evaluate = "--eval-interval 2 --eval-iters 2 --train-iters 2"
        reference = packed.train(1, f"{LOSS} {evaluate}")
        run = packed.train(4, f"{BALANCED} {evaluate} {CP} 2 {PP} 2 --micro-batch-size 2")
    finally:
        packed.base[packed.base.index("80,20,0")] = "100,0,0"
    assert len(run.validation) == len(reference.validation) >= 1
    np.testing.assert_allclose(run.validation, reference.validation, rtol=1e-6)  # which Megatron sums in float32


def test_bf16(pool, tmp_path):
    """Mixed precision trains alike, to its own precision."""
    base = [*MODEL, *write_documents(tmp_path / "documents", heavy_tailed(400, seed=1)), *LOSS.split()]
    base += "--bf16 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1".split()
    alone = train(pool, 1, base=base)
    run = train(pool, 4, f"--balance-sequences {CP} 2 {OVERLAPS}", base=base)
    np.testing.assert_allclose(run.losses, alone.losses, rtol=3e-3)


def test_events_and_report(packed, tmp_path):
    """What was spread, sent and waited for, and tokens and attention of each rank."""
    flags = f"{CP} 2 {PP} 2 {settings('sequences', planner='zones', chunk=8)} --balance-report {tmp_path}"
    packed.train(4, f"{BALANCED} {flags}")
    lines = events_in(tmp_path)
    spread = [line for line in lines if line["balancer"] == "sequences" and line["action"] == "spread"]
    assert {(line["iteration"], line["stage"]) for line in spread} == {(i, s) for i in range(1, 4) for s in range(2)}
    for line in spread:
        assert line["methods"] == {"zones": 4} and line["micro_batches"] == 4
        assert line["token_imbalance"] == 1.0
        assert line["local_share"] + line["intra_node_share"] == pytest.approx(1)
        assert line["plan_wait_ms"] > 0, "without a worker the step waits for its plans"
        sent = [line[name] for name in ("kv_intra_bytes", "kv_inter_bytes", "remap_intra_bytes", "remap_inter_bytes")]
        assert sum(sent) == line["moved_bytes"] > 0
        assert sent[1] == sent[3] == 0, "one node"
        for when in ("before", "after"):
            assert line[f"ordered_{when}"] == sorted(line[f"ordered_{when}"], reverse=True)
            assert line[f"ordered_{when}"][0] == pytest.approx(line[f"imbalance_{when}"])
            assert np.mean(line[f"ordered_{when}"]) == pytest.approx(1)
    assert sum(line["remap_intra_bytes"] for line in spread) > 0
    ranks = [line for line in lines if line["balancer"] == "sequences" and line["unit"] == "rank"]
    assert all(line["token_imbalance"] == 1.0 for line in ranks)
    before, after = (np.mean([line[f"imbalance_{when}"] for line in spread]) for when in ("before", "after"))
    assert np.mean([line["imbalance_before"] for line in ranks]) < before
    assert after < before
    history = read_history(tmp_path)
    assert history.damage.count == 0
    assert "Attention of ranks in a micro-batch" in page(history, summarize(history))


def _on_two_nodes(argv: list[str]) -> RankRun:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return train_rank(argv, True)


@pytest.mark.exhaustive
def test_routing_between_nodes(packed, alone, tmp_path):
    """Four ranks as two nodes of two: what one sends to the other node goes through both."""
    flags = f"{BALANCED} {CP} 4 {settings('sequences', planner='ring', routing=2)} --balance-report {tmp_path}"
    run = join(packed.pool.run(4, _on_two_nodes, packed.from_start(flags)))
    assert_close(run, alone)
    spread = events_in(tmp_path, action="spread")
    assert all(line["kv_inter_bytes"] > 0 and line["inter_node_share"] > 0 for line in spread)


def _with_another_digest(argv: list[str]) -> RankRun:
    """Train as if this rank had made another plan, if it is rank 1."""
    import os

    from balancing.sequences import SequencePlan

    if os.environ["RANK"] == "1":
        SequencePlan.digest = property(lambda plan: f"another {plan}")  # type: ignore[assignment, method-assign]
    return train_rank(argv, False)


def test_different_plans_stop_the_run(packed):
    argv = packed.from_start(f"{BALANCED} {CP} 2")
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] made different plans"):
        join(packed.pool.run(2, _with_another_digest, argv))


def test_one_rank_has_nothing_to_balance(packed, alone):
    run = packed.train(1, f"{LOSS} --balance-sequences")
    notes = [line for output in packed.pool.output for line in output.splitlines() if "nothing to balance" in line]
    assert len(notes) == 1 and f"{CP} 1" in notes[0]
    assert_same(run, alone)


class _Samples(torch.utils.data.Dataset):
    """Samples of 16 tokens, numbered through, in documents; the last `padding` tokens of each are padding."""

    index_split = "train"

    def __init__(self, documents: list[list[int]], padding: list[int]) -> None:
        self.documents, self.padding = documents, padding

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Any]:
        bounds = torch.full((17,), 16, dtype=torch.int32)
        ends = np.cumsum(self.documents[index])
        bounds[: len(ends) + 1] = torch.tensor([0, *ends])
        tokens = torch.arange(16) + 100 * (index + 1)
        mask = torch.ones(16)
        if self.padding[index]:
            tokens[-self.padding[index] :] = 7
            mask[-self.padding[index] :] = 0
        positions = torch.cat([torch.arange(n) for n in self.documents[index]])
        return {
            "tokens": tokens, "labels": tokens + 1, "loss_mask": mask, "position_ids": positions,
            "cu_seqlens": bounds, "max_seqlen": torch.tensor(max(self.documents[index])),
        }  # fmt: skip


@pytest.mark.parametrize("fixed", [False, True])
def test_ranks_share_every_token(pool, fixed):
    """All tokens but the padding, once, with their own labels and positions, in as many rows on every rank."""
    pool.run(1, _share, fixed)


def _share(fixed: bool) -> None:
    import pickle

    from torch.utils.data import DataLoader

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape
    from balancing.sequences.config import SequenceConfig
    from balancing.sequences.engine.compiler import compile_rank
    from megatron.balanced.sequences.dataset import PlannedDataset, Rows
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.moved_tokens import positions
    from megatron.balanced.sequences.planner import Planner

    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=3)
    config, shape = SequenceConfig(enabled=True, planner="zones", chunk=2), AttentionShape(32, 4, 4, 2, 64)
    samples = _Samples([[10, 6], [1, 2, 13], [16]], padding=[0, 5, 15])
    ranks = []
    for rank in range(3):
        dataset = PlannedDataset(
            samples, Planner(config, cluster, rank, shape), Domain(rank, 3), Rows(3, 2, fixed), padding=7
        )
        assert (len(dataset), dataset.index_split) == (3, "train")
        (batch,) = DataLoader(dataset, batch_sampler=[[0, 1, 2]])
        plan, ((_, program), *_), origins, _ = pickle.loads(batch["plan"][0])
        assert origins == (0,) * len(plan.lengths)
        assert program == compile_rank(plan, rank)
        own = positions(plan, rank, batch["tokens"].shape[1])
        assert own.tolist() == batch["position_ids"][0].tolist()
        ranks.append({name: batch[name][0] for name in ("tokens", "labels", "loss_mask", "position_ids")})
    assert plan.lengths == (10, 6, 1, 2, 8, 3)  # of the last sample one token is real; no rank may be empty
    assert {len(rank["tokens"]) for rank in ranks} == {16 if fixed else 10}
    together = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
    kept = together["labels"] > 0
    expected = [samples[i] for i in range(3)]
    for name, values in together.items():
        whole = torch.cat([sample[name][:n] for sample, n in zip(expected, (16, 11, 3), strict=True)])
        assert sorted(values[kept].tolist()) == sorted(whole.tolist()), name
        if name == "tokens":  # padding repeats one of the rank's
            assert set(values[~kept].tolist()) <= set(values[kept].tolist())
        else:
            assert not values[~kept].any()
    assert torch.equal(together["labels"][kept], together["tokens"][kept] + 1)


def _kernels_asked_for(argv: list[str]) -> list[tuple[str, str | None, tuple[int, ...]]]:
    """Train as if a measurement chose cuDNN's kernel. Returns what was asked for."""
    from balancing.kernels.base import CPU
    from balancing.kernels.choice import Choice
    from megatron.balanced.sequences import tokens

    asked = []

    def choose(device: Any, heads: Any, wanted: str = "auto", process_group: Any = None, had: Any = None) -> Choice:
        asked.append((wanted, had, tuple(heads[1:])))
        return Choice(CPU, "cudnn", "attention: chosen", {"cudnn": 5e14})

    tokens.choose_kernel = choose
    train_rank(argv, False)
    return asked


def test_a_checkpoint_records_the_kernel_and_a_resumed_run_asks_for_it(packed, tmp_path):
    saved, report = tmp_path / "saved", tmp_path / "report"
    flags = f"{BALANCED} {CP} 2 --tensor-model-parallel-size 2 --train-iters 2"
    first = packed.pool.run(4, _kernels_asked_for, packed.whole(f"{flags} --save {saved} --save-interval 1"))
    heads = first[0][0][2]
    assert heads[0] == 4 // 2 and first == [[("auto", None, heads)]] * 4
    flags += f" --load {saved} --ckpt-step 1 --attention-backend fused --balance-report {report}"
    assert packed.pool.run(4, _kernels_asked_for, packed.whole(flags)) == [[("fused", "cudnn", heads)]] * 4
    (line,) = events_in(report, action="spread")
    assert (line["kernel"], line["kernel_flops"]) == ("cudnn", {"cudnn": 5e14})
