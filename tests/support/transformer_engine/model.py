"""A model that trains on Transformer Engine's layers, in any layout from the same weights.

Transformer Engine has no float64, so runs are compared in float32. Linear layers have no biases: that of the keys
cannot change a softmax, its gradient is rounding noise, and Adam makes whole steps of it.
"""

from functools import cache
from pathlib import Path
from typing import Any

from tests.support.training import MODEL, MOE, Run, differences, train

__all__ = ["EXPERTS", "LOCAL", "SINGLE", "TE", "Model", "assert_close"]

SINGLE = "--clip-grad 0 --attention-dropout 0 --hidden-dropout 0"
BASE = (
    f"{SINGLE} --disable-bias-linear --init-method-std 0.1 --use-cpu-initialization --global-batch-size 4 "
    "--make-vocab-size-divisible-by 64"
)
TE = "--transformer-impl transformer_engine --attention-backend unfused"
LOCAL = "--transformer-impl local"
EXPERTS = " ".join([*MOE, *"--moe-aux-loss-coeff 1e-2".split()])


class Model:
    """One model on one corpus, started from one checkpoint that Transformer Engine's layers wrote."""

    def __init__(self, pool: Any, corpus: list[str], flags: str, folder: Path) -> None:
        self.pool, self.base = pool, [*MODEL, *corpus, *BASE.split(), *flags.split()]
        self.start = f"--load {folder} --finetune --no-load-optim --no-load-rng"
        # With a learning rate of 0, one iteration writes the initial weights.
        train(pool, 1, f"{TE} --lr 0 --train-iters 1 --save {folder} --save-interval 1", base=self.base)
        self.alone = cache(self._alone)

    def argv(self, flags: str) -> list[str]:
        """The command line of a run from the common start."""
        return [*self.base, *f"{TE} {self.start} {flags}".split()]

    def train(self, world_size: int, flags: str = "") -> Run:
        return train(self.pool, world_size, base=self.argv(flags), parameters=True)

    def _alone(self, flags: str = "") -> Run:
        """The run on one rank, made once."""
        return self.train(1, flags)


def assert_close(run: Run, reference: Run, of_losses: float = 1e-6, of_parameters: float = 1e-5) -> None:
    """Equal but for rounding in float32."""
    losses, parameters = differences(run, reference)
    assert losses <= of_losses, losses
    assert parameters <= of_parameters, parameters
