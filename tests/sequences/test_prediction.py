"""Multi-token prediction (`--mtp-num-layers`) over documents spread over ranks trains the same model as on one rank.

The reference is Megatron-LM on one rank, which shifts whole samples. Ends of documents have no loss here, so
micro-batches have unequal numbers of losses, and other numbers after each shift.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sequences.test_domain import _datasets
from tests.sequences.test_packed_documents import PACKED, PP, SP, Packed
from tests.sequences.test_training import _Samples
from tests.support.refusals import assert_refused
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL, MOE, Run, assert_close, differences, join, watch

CP, EP = "--context-parallel-size", "--expert-model-parallel-size"
ENDS = f"{PACKED} --eod-mask-loss"
BALANCED = f"{ENDS} --balance-sequences"
PER_TOKEN = "--calculate-per-token-loss"
UNTIED = "--untie-embeddings-and-output-weights --disable-bias-linear"
PREDICTION = f"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 {UNTIED}"
SHORT = "--global-batch-size 4 --train-iters 2"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
DEALT = "--sequence-micro-batches"

# ranks, flags
LAYOUTS = {
    "CP 2, PP 2": (4, f"{CP} 2 {PP} 2"),
    "CP 2, TP 2, sequence parallel": (4, f"{CP} 2 {SP}"),
    "CP 4, rings": (4, f"{CP} 4 {settings('sequences', planner='ring')} --num-workers 1"),
    "CP 2, PP 2, interleaved": (4, f"{CP} 2 {PP} 2 --pipeline-model-parallel-layout Et|t|t|tmmL"),
    "CP 2, full recompute": (
        2,
        f"{CP} 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "CP 2, PP 4, prediction before the last stage": (8, f"{CP} 2 {PP} 4 --pipeline-model-parallel-layout Ett|tt|mm|L"),
    "CP 2, DP 2 alone": (4, f"{CP} 2 --sequence-domain context"),
    "DP 4": (4, ""),
    "DP 2, CP 2, both overlaps": (4, f"{CP} 2 --sequence-domain data {OVERLAPS}"),
    "DP 2, PP 2, zones": (4, f"{PP} 2 {settings('sequences', planner='zones')}"),
    "PP 2, dealt": (2, f"{PP} 2 {DEALT}"),
    "PP 2, CP 2, DP 2, dealt": (8, f"{PP} 2 {CP} 2 --sequence-domain data {DEALT}"),
    "PP 2, TP 2, sequence parallel, dealt": (4, f"{PP} 2 {SP} {DEALT}"),
    "DP 2, PP 4, prediction before the last stage, dealt": (
        8,
        f"{PP} 4 --pipeline-model-parallel-layout Ett|tt|mm|L {DEALT}",
    ),
}
FIRST = "CP 2, PP 2"


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("prediction"), f"{PREDICTION} {SHORT}")


def _train_rank(argv: list[str]) -> tuple[Any, dict[str, list[float]]]:
    """What a rank saw of a run, and what Megatron-LM logs of predicted tokens, by name."""
    from megatron.balanced.trainer.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    from megatron.balanced.trainer.train import train

    logged: dict[str, list[float]] = {}
    track = MTPLossLoggingHelper.track_mtp_metrics

    class Writer:
        def add_scalar(self, name: str, value: Any, iteration: int) -> None:
            logged.setdefault(name, []).append(float(value))

    def tracked(loss_scale: float, iteration: int, writer: Any, *rest: Any, **named: Any) -> None:
        track(loss_scale, iteration, Writer(), *rest, **named)

    MTPLossLoggingHelper.track_mtp_metrics = staticmethod(tracked)
    finish = watch(keep_parameters=True)
    train(args, config, ())
    return finish(), logged


def _train(packed: Packed, ranks: int, flags: str) -> tuple[Run, dict[str, list[float]]]:
    runs, logged = zip(*packed.pool.run(ranks, _train_rank, packed.from_start(flags)), strict=True)
    (first, *others) = [each for each in logged if each]
    assert all(other == first for other in others), "ranks log the same"
    return join(list(runs)), first


def _assert_alike(packed: Packed, ranks: int, flags: str, alone: str) -> None:
    (run, logged), (reference, of_reference) = _train(packed, ranks, flags), _train(packed, 1, alone)
    assert_close(run, reference)
    assert logged.keys() == of_reference.keys() and len(logged) == 6
    for name, values in of_reference.items():
        tolerance = 1e-12 if name.endswith("loss") else 1e-6  # rates are float32
        np.testing.assert_allclose(logged[name], values, rtol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        pytest.param(
            layout, loss, id=f"{layout}-{name}", marks=[] if (layout, loss) == (FIRST, "") else pytest.mark.exhaustive
        )
        for layout in LAYOUTS
        for name, loss in (("per micro-batch", ""), ("per token", PER_TOKEN))
    ],
)
def test_predicted_tokens_equal_one_rank(packed, layout, loss):
    """Two layers deep. Losses, parameters, and what Megatron-LM logs of each depth."""
    ranks, flags = LAYOUTS[layout]
    _assert_alike(packed, ranks, f"{BALANCED} {flags} {loss}", f"{ENDS} {loss}")


@pytest.mark.exhaustive
def test_the_losses_differ(packed):
    """So that the tests above tell weights of tokens and ends of documents apart."""
    reference = packed.alone(ENDS)
    for other in (f"{ENDS} {PER_TOKEN}", "--eod-mask-loss", f"{ENDS} --mtp-loss-scaling-factor 0.6"):
        _, parameters = differences(packed.train(1, other), reference)
        assert parameters > 1e-9, other


LATENT = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
MODELS = {
    "repeated": ("", "--mtp-use-repeated-layer", f"{CP} 2 {SP}"),
    "detached": ("", "--mtp-detach-heads", f"{CP} 2 {PP} 2"),
    "windows in layers of odd numbers": (
        "",
        "--window-size 5,0 --window-attn-skip-freq 2 --softmax-type learnable",
        f"{CP} 2 {PP} 2 {settings('sequences', planner='zones')}",
    ),
    "DeepSeek-V3's": (
        "",
        f"{LATENT} --q-lora-rank 16 --qk-layernorm --normalization RMSNorm --rotary-scaling-factor 4 {' '.join(MOE)} "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall",
        f"{CP} 2 {PP} 2 {EP} 2 --balance-experts {settings('experts', min_gain=0)}",
    ),
    "experts with losses of micro-batches and samples": (
        "",
        f"{' '.join(MOE)} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 2e-2 "
        "--moe-token-dispatcher-type alltoall",
        f"{EP} 2 --sequence-domain data",
    ),
    "two samples a micro-batch": ("--micro-batch-size 2", "", "--sequence-domain data"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
def test_models_that_predict(pool, tmp_path, model):
    both, flags, layout = MODELS[model]
    packed = Packed(pool, tmp_path, f"{PREDICTION} {flags} {SHORT}")
    _assert_alike(packed, 2 if not flags else 4, f"{BALANCED} {both} {layout}", f"{ENDS} {both}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["", PER_TOKEN])
def test_samples_as_sequences_predict(pool, tmp_path, loss):
    """Where documents attend to each other, a sample is shifted as a whole."""
    samples = Packed(pool, tmp_path, f"{PREDICTION} --eod-mask-loss {SHORT} {loss}")
    _assert_alike(samples, 2, f"--balance-sequences {CP} 2 --micro-batch-size 2", "--micro-batch-size 2")


@pytest.mark.exhaustive
def test_validation_of_models_that_predict(packed):
    """Forward passes alone, which log nothing of predicted tokens."""
    packed.base[packed.base.index("100,0,0")] = "80,20,0"
    try:
        flags = "--eval-interval 1 --eval-iters 2 --train-iters 1"
        reference = packed.train(1, f"{ENDS} {flags}")
        run = packed.train(4, f"{BALANCED} {flags} {CP} 2 {PP} 2")
    finally:
        packed.base[packed.base.index("80,20,0")] = "100,0,0"
    assert_close(run, reference)
    assert len(run.validation) == len(reference.validation) >= 1
    np.testing.assert_allclose(run.validation, reference.validation, rtol=1e-6)  # which Megatron sums in float32


# Rows.


def _shifted(folder: Path, kind: str) -> int:
    """Rows compared of three ranks with those of Megatron-LM's whole samples, shifted twice."""
    import pickle

    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.sequences.dataset import PlannedDataset, Rows, document_lengths
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.planner import Planner

    names, dataset = ("tokens", "labels", "loss_mask", "position_ids"), _datasets(folder)[kind]
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=4)
    shape = AttentionShape(32, 4, 4, 2, 64)
    config = SequenceConfig(enabled=True, planner="zones")
    expected, ours = [], []
    for index in (3, 4):
        sample = dataset[index]
        bounds = torch.tensor([0, *np.cumsum(document_lengths(dataset, index))], dtype=torch.int32)
        packed = PackedSeqParams(cu_seqlens_q=bounds)
        shifts = [[sample[name][None] for name in names]]
        for _ in range(2):
            shifts.append([roll_tensor(each, packed_seq_params=packed)[0] for each in shifts[-1]])
        expected.append(torch.cat([each.double() for shift in shifts for each in shift]))
    for rank in range(4):
        planned = PlannedDataset(
            dataset, Planner(config, cluster, rank, shape), Domain(rank, 4), Rows(4, 1, True, shifts=2), None
        )
        (batch,) = planned.__getitems__([3, 4])
        plan = pickle.loads(batch["plan"])[0]
        rows = torch.stack([batch[name].double().view(3, -1) for name in names], dim=1).flatten(0, 1)
        ours.append(rows[:, : int(plan.linear_tokens[rank])])
    together, whole = (sorted(torch.cat(parts, dim=1).t().tolist()) for parts in (ours, expected))
    assert together == whole
    assert any(row[4] != row[1] for row in whole) and any(row[8] == 0 for row in whole)
    return len(together)


@pytest.mark.parametrize("kind", sampled(["documents", "samples"], "documents"))
def test_shifted_rows_are_those_of_whole_samples(pool, tmp_path, kind):
    """As Megatron-LM shifts them: in each document if documents do not attend to each other, else in each sample."""
    assert pool.run(1, _shifted, tmp_path, kind) == [2 * 64]


def _losses_of_padded() -> tuple[list[list[int]], list[list[int]]]:
    """Labels that count at each depth, of three ranks and of Megatron-LM's whole samples, whose padding is shifted."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.sequences.dataset import PlannedDataset, Rows
    from megatron.balanced.sequences.domain import Domain
    from megatron.balanced.sequences.planner import Planner

    documents, padding = [[10, 6], [1, 2, 13], [16]], [0, 5, 12]
    samples = _Samples(documents, padding)
    cluster = Cluster.preset("h200-8x400g").relabel(nodes=1, ranks_per_node=3)
    shape = AttentionShape(32, 4, 4, 2, 64)
    config = SequenceConfig(enabled=True, planner="zones", chunk=2)
    found: tuple[list[list[int]], list[list[int]]] = [[], [], []], [[], [], []]
    for rank in range(3):
        dataset = PlannedDataset(
            samples, Planner(config, cluster, rank, shape), Domain(rank, 3), Rows(3, 1, False, shifts=2), padding=7
        )
        (batch,) = dataset.__getitems__([0, 1, 2])
        labels, masks = batch["labels"].view(3, -1), batch["loss_mask"].view(3, -1)
        for depth in range(3):
            found[0][depth] += labels[depth][masks[depth] > 0].tolist()
    for index, lengths in enumerate(documents):
        packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))
        labels, mask = (samples[index][name][None] for name in ("labels", "loss_mask"))
        for depth in range(3):
            found[1][depth] += labels[mask > 0].tolist()
            labels, mask = (roll_tensor(each, packed_seq_params=packed)[0] for each in (labels, mask))
    return found


def test_padding_that_is_cut_off_has_no_loss_at_any_depth(pool):
    """Conversations are cut behind their last token with a loss; the last document of a sample ends there."""
    ((ours, whole),) = pool.run(1, _losses_of_padded)
    assert [sorted(each) for each in ours] == [sorted(each) for each in whole]
    assert len(whole[0]) > len(whole[1]) > len(whole[2]) > 0


def test_refused_in_parts(pool):
    base = [*MODEL, *MOCK_DATA, *f"{PACKED} --attention-dropout 0 --mtp-num-layers 1 {UNTIED}".split()]
    flags = f"{' '.join(MOE)} --balance-sequences {CP} 2 {EP} 2 --overlap-moe-expert-parallel-comm "
    words = "--mtp-num-layers 1", "drop one of the two"
    assert_refused(pool, base, {"in parts": (f"{flags} --moe-token-dispatcher-type alltoall", *words)})
