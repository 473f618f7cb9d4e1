"""Layers of multi-token prediction (`--mtp-num-layers`) train the same model in every layout, in float64 on the CPU.

They need the norm for sequence parallelism and the attention for packed documents as the layers before them do.
"""

import numpy as np
import pytest

from tests.support.corpus import END_OF_DOCUMENT, heavy_tailed, write_documents
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MODEL, MOE, Run, assert_close, differences, train

PREDICTION = "--mtp-num-layers 2 --untie-embeddings-and-output-weights --init-method-std 0.1"
REPEATED = f"{PREDICTION} --mtp-use-repeated-layer"
PACKED = "--dataloader-inter-document-masking"
PP = "--pipeline-model-parallel-size"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
EP = f"{SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
EXPERTS = f"{PREDICTION} {' '.join(MOE)} --moe-aux-loss-coeff 1e-2"

# model, ranks, flags
LAYOUTS = {
    "TP 2": ("dense", 2, TP),
    "TP 2, sequence parallel": ("dense", 2, SP),
    "TP 2, PP 2, sequence parallel": ("dense", 4, f"{SP} {PP} 2"),
    "repeated, TP 2, sequence parallel": ("repeated", 2, SP),
    "packed, PP 2": ("dense", 2, f"{PP} 2 {PACKED}"),
    "packed, TP 2, sequence parallel": ("dense", 2, f"{SP} {PACKED}"),
    "repeated, packed, TP 2, sequence parallel": ("repeated", 2, f"{SP} {PACKED}"),
    "experts": ("experts", 2, EP),
    "experts, packed, balanced": ("experts", 2, f"{EP} {PACKED} --balance-experts {settings('experts', min_gain=0)}"),
}
MODELS = {"dense": PREDICTION, "repeated": REPEATED, "experts": EXPERTS}


class Models:
    """The models on one corpus, each started from one checkpoint, and their runs on one rank."""

    def __init__(self, pool, folder) -> None:
        self._pool, self._folder = pool, folder
        self._corpus = write_documents(folder / "documents", heavy_tailed(400, seed=1))
        self._on_one_rank: dict[tuple[str, bool], Run] = {}

    def train(self, model: str, world_size: int, flags: str, corpus: list[str] | None = None) -> Run:
        vocabulary = f"--make-vocab-size-divisible-by {64 if TP in flags else 128}"
        start = self._folder / model
        base = [*MODEL, *(corpus or self._corpus), *EXACT, *MODELS[model].split(), *vocabulary.split()]
        if not start.exists():
            train(self._pool, 1, f"--lr 0 --train-iters 1 --save {start} --save-interval 1", base=base)
        flags = f"{flags} --load {start} --finetune --no-load-optim --no-load-rng"
        return train(self._pool, world_size, flags, base=base, parameters=True)

    def on_one_rank(self, model: str, packed: bool) -> Run:
        if (model, packed) not in self._on_one_rank:
            self._on_one_rank[model, packed] = self.train(model, 1, PACKED if packed else "")
        return self._on_one_rank[model, packed]


@pytest.fixture(scope="module")
def models(pool, tmp_path_factory) -> Models:
    return Models(pool, tmp_path_factory.mktemp("prediction"))


SAMPLE = ("experts, packed, balanced",)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, *SAMPLE))
def test_layouts_predict_alike(models, layout):
    model, world_size, flags = LAYOUTS[layout]
    reference = models.on_one_rank(model, PACKED in flags)
    assert any("mtp" in name for name in reference.parameters)
    assert_close(models.train(model, world_size, flags), reference)


def test_one_document_a_sequence(models, tmp_path):
    """Where no document ends within a sequence, packed documents are an ordinary batch."""
    random = np.random.default_rng(3)
    endless = write_documents(tmp_path / "endless", [random.integers(0, END_OF_DOCUMENT, 4000)])
    assert_close(models.train("dense", 1, PACKED, endless), models.train("dense", 1, "", endless))


def test_boundaries_matter(models):
    losses, _ = differences(models.on_one_rank("dense", packed=True), models.on_one_rank("dense", packed=False))
    assert losses > 1e-6
