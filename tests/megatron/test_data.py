"""The data of a run: blends in their proportions, each sample once, validation, and mock data."""

from typing import Any

import numpy as np
import pytest

from tests.support import training
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.training import train, train_rank

MODEL = [*training.MODEL, *"--global-batch-size 8".split()]


def _tokens(argv: list[str]) -> np.ndarray:
    """Train, and return the token sequences this rank read, [samples, sequence length]."""
    from megatron.balanced.trainer import data

    seen: list[np.ndarray] = []
    broadcast = data.get_batch_on_this_tp_rank

    def watched(batch: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        seen.append(batch["tokens"].numpy().copy())
        return broadcast(batch, *args, **kwargs)

    data.get_batch_on_this_tp_rank = watched
    train_rank(argv, False)
    return np.concatenate(seen)


def test_blend_keeps_its_proportions(pool, tmp_path):
    low = write_documents(tmp_path / "low", heavy_tailed(200, seed=1, high=60))
    write_documents(tmp_path / "high", heavy_tailed(200, seed=2, low=60))
    flags = [tmp_path / "low" if flag == str(tmp_path / "low") else flag for flag in low]
    at = flags.index("--data-path")
    flags[at + 1 : at + 2] = ["25", str(tmp_path / "low"), "75", str(tmp_path / "high")]
    (tokens,) = pool.run(1, _tokens, [*MODEL, *flags, "--train-iters", "5"])
    assert tokens.shape == (40, 32)
    from_low = (tokens < 60).sum(axis=1) > (tokens >= 60).sum(axis=1)
    assert from_low.sum() == 10


def test_every_sample_is_read_once(pool, corpus):
    """Two replicas share the samples of one rank, in the same order, and no sample comes twice in an epoch."""
    (alone,) = pool.run(1, _tokens, [*MODEL, *corpus])
    first, second = pool.run(2, _tokens, [*MODEL, *corpus])
    assert len(np.unique(alone, axis=0)) == len(alone) == 32
    assert np.array_equal(np.stack([first, second], axis=1).reshape(alone.shape), alone)


def test_order_does_not_depend_on_loader_processes(pool, corpus):
    (alone,) = pool.run(1, _tokens, [*MODEL, *corpus])
    (with_workers,) = pool.run(1, _tokens, [*MODEL, *corpus, "--num-workers", "2"])
    assert np.array_equal(alone, with_workers)


@pytest.mark.parametrize("world_size, layout", [(2, "--pipeline-model-parallel-size 2"), (2, "")])
def test_validation(pool, corpus, world_size, layout):
    """Validation runs where it should, is the same in every layout, and leaves training alone."""
    base = [*MODEL, *corpus]
    base[base.index("100,0,0")] = "80,15,5"
    exact = "--fp64 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0"
    without = train(pool, world_size, f"{exact} {layout}", base=base)
    run = train(pool, world_size, f"{exact} {layout} --eval-interval 2 --eval-iters 2", base=base)
    assert run.losses == without.losses
    assert len(run.validation) == 4  # after iterations 2 and 4, at the end, and the test set
    assert all(abs(loss - without.losses[0]) < 0.5 for loss in run.validation)
    assert run.validation[1] < run.validation[0], "the model learned nothing that helps on the validation set"


@pytest.mark.exhaustive
def test_validation_does_not_depend_on_the_layout(pool, corpus, tmp_path):
    base = [*MODEL, *corpus]
    base[base.index("100,0,0")] = "80,15,5"
    start = f"--save {tmp_path} --save-interval 1 --lr 0 --train-iters 1"
    train(pool, 1, start, base=base)
    load = f"--load {tmp_path} --finetune --no-load-optim --no-load-rng --eval-interval 4 --eval-iters 2"
    runs = [
        train(pool, world_size, f"{load} --attention-dropout 0 --hidden-dropout 0 {layout}", base=base).validation
        for world_size, layout in [(1, ""), (2, "--pipeline-model-parallel-size 2"), (2, "")]
    ]
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)
    assert runs[2] == pytest.approx(runs[0], rel=1e-6)
