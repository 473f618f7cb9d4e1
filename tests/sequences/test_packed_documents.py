"""Documents packed into one sequence attend to themselves alone, in every layout, without Transformer Engine.

The reference is Megatron's own dense mask: `--reset-attention-mask` cuts the mask of the data loader at the same
boundaries. In float64 both are the same numbers, except with rotary embeddings: their angles are float32 whatever the
precision of the run, and the dense mask counts positions from the start of the sequence.
"""

from itertools import pairwise

import numpy as np
import pytest

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.sampled import sampled
from tests.support.training import EXACT, MODEL, MOE, Run, assert_close, differences, train

PACKED = "--dataloader-inter-document-masking"
DENSE_MASK = "--reset-attention-mask --reset-position-ids"
PP = "--pipeline-model-parallel-size"
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
# The bias of the keys cannot change a softmax: its gradient is rounding noise, of which Adam makes whole steps.
LEARNED = "--position-embedding-type learned_absolute --disable-bias-linear"
ROTARY_TOLERANCE = 1e-8  # of losses

# ranks, flags
LAYOUTS = {
    "PP 2": (2, f"{PP} 2"),
    "PP 4": (4, f"{PP} 4"),
    "PP 2, micro-batches of two": (2, f"{PP} 2 --micro-batch-size 2"),
    "PP 2, interleaved": (2, f"{PP} 2 --num-virtual-stages-per-pipeline-rank 2"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "TP 2, PP 2, sequence parallel": (4, f"{SP} {PP} 2"),
    "DP 2": (2, ""),
    "micro-batches of two": (1, "--micro-batch-size 2"),
    "full recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
}


class Packed:
    """One model on one corpus, started from one checkpoint."""

    def __init__(self, pool, tmp_path, model: str = "") -> None:
        self.pool, self.model, self.folder = pool, model, tmp_path / "start"
        # Some documents are shorter than a sequence of 32 tokens, some are longer.
        self.base = [*MODEL, *write_documents(tmp_path / "documents", heavy_tailed(400, seed=1))]
        first = f"--lr 0 --train-iters 1 --save {self.folder} --save-interval 1"
        train(pool, 1, first, base=self.whole(""))
        self._alone: dict[str, Run] = {}

    def whole(self, flags: str) -> list[str]:
        """The command line of a run that is described by `flags`."""
        tensor_ranks = 2 if "--tensor-model-parallel-size 2" in flags else 1
        vocabulary = f"--make-vocab-size-divisible-by {128 // tensor_ranks}"
        every = f"{' '.join(EXACT)} --init-method-std 0.1 {vocabulary} {self.model} {flags}"
        return [*self.base, *every.split()]

    def from_start(self, flags: str) -> list[str]:
        """The same, for a run from the common start."""
        return self.whole(f"{flags} --load {self.folder} --finetune --no-load-optim --no-load-rng")

    def train(self, world_size: int, flags: str) -> Run:
        return train(self.pool, world_size, base=self.from_start(flags), parameters=True)

    def alone(self, flags: str) -> Run:
        """On one rank: the reference of all layouts, run once."""
        flags = " ".join(flags.split())
        if flags not in self._alone:
            self._alone[flags] = self.train(1, flags)
        return self._alone[flags]


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory) -> Packed:
    return Packed(pool, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def on_one_rank(packed) -> Run:
    return packed.train(1, PACKED)


@pytest.fixture(scope="module")
def dense_mask(packed) -> Run:
    return packed.train(1, DENSE_MASK)


@pytest.mark.parametrize(
    "layout", sampled(LAYOUTS, "TP 2, PP 2, sequence parallel", "PP 2, micro-batches of two", "full recompute")
)
def test_layouts_agree(packed, on_one_rank, layout):
    world_size, flags = LAYOUTS[layout]
    assert_close(packed.train(world_size, f"{PACKED} {flags}"), on_one_rank)


def test_equals_a_dense_mask(pool, tmp_path):
    learned = Packed(pool, tmp_path, LEARNED)
    assert_close(learned.train(1, PACKED), learned.train(1, DENSE_MASK))


def test_equals_a_dense_mask_with_rotary_embeddings(on_one_rank, dense_mask):
    losses, _ = differences(on_one_rank, dense_mask)
    assert losses <= ROTARY_TOLERANCE


def test_boundaries_matter(packed, dense_mask):
    """Attention across documents gives another model, so the tests above compare something."""
    losses, _ = differences(packed.train(1, ""), dense_mask)
    assert losses > 1000 * ROTARY_TOLERANCE


@pytest.mark.exhaustive
def test_with_experts(pool, tmp_path):
    experts = Packed(pool, tmp_path, f"{' '.join(MOE)} {LEARNED}")
    layout = f"{PACKED} {PP} 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    assert_close(experts.train(4, layout), experts.train(1, DENSE_MASK))


def _attention(lengths: list[int]) -> float:
    """The largest difference of packed attention and its gradients from attention over each document by itself."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.local.packed_attention import PackedDotProductAttention

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.set_default_dtype(torch.float64)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = PackedDotProductAttention(config, 1, AttnMaskType.causal, "self")
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    inputs = [torch.randn(int(bounds[-1]), 4, 8, requires_grad=True) for _ in range(3)]  # query, key, value
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    alone = []
    for start, stop in pairwise(bounds):
        document = [part[start:stop].transpose(0, 1) for part in inputs]
        alone.append(torch.nn.functional.scaled_dot_product_attention(*document, is_causal=True).transpose(0, 1))
    expected = torch.cat(alone).flatten(1)
    output = attention(*inputs, None, packed_seq_params=packed)
    weights = torch.randn_like(output)
    gradients = [torch.autograd.grad((weights * result).sum(), inputs) for result in (output, expected)]
    pairs = [(output, expected), *zip(*gradients, strict=True)]
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize("lengths", [[7], [1, 1, 1], [3, 0, 5, 1], [2, 30]])
def test_attention_of_one_sequence(pool, lengths):
    (worst,) = pool.run(1, _attention, lengths)
    assert worst < 1e-13
