"""Pipelines in which stages have no layers, between them or at the ends, train as one rank does: dynamic models too."""

import pytest

from tests.support.events import events_in
from tests.support.moving import train_moving
from tests.support.sampled import sampled
from tests.support.settings import EARLY_EXIT, HASH_ATTENTION, PLASTICITY, scheme_flags, settings
from tests.support.training import EXACT, MODEL, MOE, assert_close, train

UNTIED = "--untie-embeddings-and-output-weights"
PP3 = "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout E|tttt|L"
PP4 = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt|tt|L"
PRUNE = scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1)
FILL = "--fill-with-weight-gradients"
EXPERTS = f"{' '.join(MOE)} --moe-token-dispatcher-type alltoall"
PACKED = "--dataloader-inter-document-masking --eod-mask-loss --disable-bias-linear"
EP2 = f"--expert-model-parallel-size 2 --balance-experts {settings('experts', min_gain=0)}"

# ranks, flags of all runs, flags of the pipeline
CASES = {
    "freezing": (4, f"{UNTIED} --freeze-layers 3 --freeze-layers-start 1", PP4),
    "plasticity": (3, f"{UNTIED} --freeze-layers 2 --freeze-layers-interval 1 {PLASTICITY} --train-iters 6", PP3),
    "pruning": (3, PRUNE, PP3),
    "mixture of depths": (3, scheme_flags(mixture_of_depths=0.25), PP3),
    "early exit": (4, EARLY_EXIT, PP4),
    "sparse attention": (3, HASH_ATTENTION, PP3),
    "experts": (6, EXPERTS, f"{PP3} {EP2}"),
    "sequences": (6, PACKED, f"{PP3} --balance-sequences --sequence-micro-batches"),
    "layers and weight gradients": (4, "--train-iters 6", f"{PP4} --balance-layers {FILL}"),
}
MOVES = {2: ((0,), (1,), (3,), (0,)), 4: ((0,), (4,), (0,), (0,))}


@pytest.mark.parametrize("name", sampled(CASES, "freezing", "early exit", "sequences", "layers and weight gradients"))
def test_stages_without_layers_change_no_number(pool, corpus, tmp_path, name):
    (ranks, flags, pipeline), base = CASES[name], [*MODEL, *corpus]
    report, same = tmp_path / "report", f"{' '.join(EXACT)} --init-method-std 0.1 {flags}"
    train(pool, 1, f"{same} --lr 0 --train-iters 1 --save {tmp_path / 'start'} --save-interval 1", base=base)
    same += f" --load {tmp_path / 'start'} --finetune --no-load-optim --no-load-rng"
    flags, reference = f"{same} {pipeline} --balance-report {report}", train(pool, 1, same, base=base, parameters=True)
    if "--balance-layers" in pipeline:
        run, _ = train_moving(pool, ranks, flags, MOVES, base=base)
    else:
        run = train(pool, ranks, flags, base=base, parameters=True)
    assert_close(run, reference)
    assert events_in(report)


def test_a_stage_without_parameters_trains(pool):
    """Without a checkpoint, which Megatron-LM cannot load there. Its rank learns from others how fast they learn."""
    flags = f"{UNTIED} --freeze-layers 2 --freeze-layers-interval 1 {PLASTICITY} --train-iters 6"
    pipeline = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt||ttL"
    assert len(train(pool, 4, f"{' '.join(EXACT)} {flags} {pipeline}").losses) == 6
