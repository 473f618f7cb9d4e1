"""Small tokenized datasets for tests, written with Megatron's own builder."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 126  # of NullTokenizer with --vocab-size 127


def write_documents(prefix: Path, documents: Iterable[np.ndarray]) -> list[str]:
    """Write `prefix`.bin and .idx. Returns the flags that train on them."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16)
    for document in documents:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(get_idx_path(str(prefix)))
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 127"
    return f"--data-path {prefix} --split 100,0,0 {tokenizer}".split()


def heavy_tailed(count: int, *, seed: int = 0, low: int = 0, high: int = END_OF_DOCUMENT) -> list[np.ndarray]:
    """Documents of 2 to a few hundred tokens in [low, high), most of them short, each ended by END_OF_DOCUMENT."""
    random = np.random.default_rng(seed)
    lengths = np.minimum(2 + (4 * random.pareto(1.0, count)).astype(int), 300)
    # A walk through the vocabulary in small steps: text that a model can learn something about.
    walks = [np.cumsum(random.integers(1, 4, length)) % (high - low) + low for length in lengths]
    return [np.append(walk, END_OF_DOCUMENT).astype(np.int64) for walk in walks]
