"""A checkpoint resumes its run bit for bit, and does not depend on this package.

That it goes on under another layout is tested with what balancers change: `tests/layers/test_checkpoints.py` and
`tests/together/test_expert_layouts.py`.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.plain import train_plainly
from tests.support.sampled import sampled
from tests.support.training import MODEL, MOE, Run, assert_same, train

PP2 = "--pipeline-model-parallel-size 2"
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
FORMAT = "--ckpt-format torch_dist"

# ranks, flags
RESUMED = {
    "one rank": (1, ""),
    "DP 2, both overlaps": (2, OVERLAPS),
    "PP 2": (2, PP2),
    "PP 2, interleaved": (2, f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "EP 2": (2, EP2),
    "bf16, EP 2, distributed optimizer": (2, f"--bf16 {EP2} {SHARDED}"),
    "TP 2, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.parametrize("name", sampled(RESUMED, "PP 2, interleaved"))
def test_resumed_is_uninterrupted(pool, corpus, tmp_path, name):
    world_size, flags = RESUMED[name]

    def run(more: str):
        return train(pool, world_size, f"{flags} {FORMAT} {more}", base=[*MODEL, *corpus], parameters=True)

    whole = run(f"--save {tmp_path} --save-interval 2")
    resumed = run(f"--load {tmp_path} --ckpt-step 2")
    assert resumed.losses == whole.losses[2:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)
    assert resumed.grad_norms == whole.grad_norms[2:]


@pytest.mark.parametrize(
    "name, world_size, flags", [("dense, PP 2", 2, PP2), pytest.param("EP 2", 2, EP2, marks=pytest.mark.exhaustive)]
)
def test_goes_on_without_our_package_and_back(pool, corpus, tmp_path, name, world_size, flags):
    """Iterations 1 and 2 with our package, 3 without, 4 with it again, against all four with it."""
    base = [*MODEL, *corpus]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    flags = f"{flags} {FORMAT}"
    whole = train(pool, world_size, f"{flags} --save {ours} --save-interval 2", base=base, parameters=True)
    third = f"{flags} --load {ours} --ckpt-step 2 --save {theirs} --save-interval 1"
    without = train_plainly(pool, world_size, [*base, *third.split()], tmp_path)
    assert without.losses == whole.losses[2:]
    last = train(pool, world_size, f"{flags} --load {theirs} --ckpt-step 3", base=base, parameters=True)
    assert last.losses == whole.losses[3:]
    _assert_same_weights(last, whole)


def _assert_same_weights(run: Run, other: Run) -> None:
    assert run.parameters.keys() == other.parameters.keys()
    for name, values in other.parameters.items():
        assert np.array_equal(run.parameters[name], values), name


@pytest.mark.exhaustive
def test_weights_of_a_distributed_optimizer_load_without_our_package(pool, corpus, tmp_path):
    """Upstream cannot load the state of its distributed optimizer without Transformer Engine; the weights it can."""
    base = [*MODEL, *corpus]
    ours = train(pool, 2, f"{OVERLAPS} --save {tmp_path / 'save'} --save-interval 4", base=base, parameters=True)
    weights = f"--load {tmp_path / 'save'} --finetune --no-load-optim --no-load-rng --lr 0 --train-iters 1"
    _assert_same_weights(train_plainly(pool, 2, [*base, *weights.split()], tmp_path), ours)
