"""Multi-latent attention without Transformer Engine: its core attention, one by one and over packed documents."""

from itertools import pairwise

import numpy as np
import pytest

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.training import EXACT, MODEL, differences, train

# Keys of 8 + 4 numbers a head, of which all heads share the last four, and values of 6.
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm --normalization RMSNorm --init-method-std 0.1"
)
PACKED = "--dataloader-inter-document-masking"
DENSE_MASK = "--reset-attention-mask --reset-position-ids"  # which counts positions from the start of the sequence
ROTARY_TOLERANCE = 1e-8  # of losses: the angles of rotary embeddings are float32 whatever the precision of the run


def _attention(lengths: list[int] | None) -> float:
    """The largest difference of core attention and its gradients from torch's, for each document by itself."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron.balanced.local.latent_attention import LatentDotProductAttention
    from megatron.balanced.local.packed_attention import PackedLatentDotProductAttention

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.set_default_dtype(torch.float64)
    config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    kind = LatentDotProductAttention if lengths is None else PackedLatentDotProductAttention
    attention = kind(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3, k_channels=12, v_channels=6)
    bounds = torch.tensor(np.cumsum([0, *(lengths or [20])]), dtype=torch.int32)
    inputs = [torch.randn(int(bounds[-1]), 4, size, requires_grad=True) for size in (12, 12, 6)]  # query, key, value
    if lengths is None:
        ours = attention(*(part[:, None] for part in inputs), None).squeeze(1)
    else:
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        ours = attention(*inputs, None, packed_seq_params=packed)
    alone = []
    for start, stop in pairwise(bounds):
        query, key, value = (part[start:stop].transpose(0, 1) for part in inputs)
        scores = (query @ key.transpose(1, 2) * 0.3).masked_fill(
            torch.ones(stop - start, stop - start).triu(1).bool(), float("-inf")
        )
        alone.append((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
    theirs = torch.cat(alone)
    weights = torch.randn_like(theirs)
    pairs = [(ours, theirs)]
    pairs += zip(*(torch.autograd.grad((result * weights).sum(), inputs) for result in (ours, theirs)), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("lengths", [None, [7, 1, 12]])
def test_values_of_another_size_than_keys(pool, lengths):
    assert pool.run(1, _attention, lengths) == [pytest.approx(0, abs=1e-13)]


def test_packed_documents_equal_a_dense_mask(pool, tmp_path):
    corpus = write_documents(tmp_path / "documents", heavy_tailed(400, seed=1))
    base = [*MODEL, *corpus, *EXACT, *LATENT.split(), *"--num-layers 2 --train-iters 2".split()]
    packed, dense, across = (train(pool, 1, flags, base=base) for flags in (PACKED, DENSE_MASK, ""))
    assert differences(packed, dense)[0] <= ROTARY_TOLERANCE
    assert differences(across, dense)[0] > 1000 * ROTARY_TOLERANCE
