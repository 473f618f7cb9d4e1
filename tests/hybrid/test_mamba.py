"""The stand-in for mamba_ssm's kernels computes what Megatron-LM's own recurrence for inference does, which takes one
token after the other in PyTorch; of packed documents, what it does of each by itself."""

from itertools import pairwise

import numpy as np
import pytest

from balancing.sequences import plan_sequences
from tests.sequences.test_plan import MHA, a800

LENGTHS = [[12], [7, 1, 2, 5], [2, 1, 3]]


def _mixer(groups: int):
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.local.mamba import ScannedMambaMixer

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.set_default_dtype(torch.float64)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        mamba_state_dim=6,
        mamba_head_dim=8,
        mamba_num_groups=groups,
        params_dtype=torch.float64,
    )
    linear = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups_of_ranks = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return ScannedMambaMixer(config, linear, 16, layer_number=1, pg_collection=groups_of_ranks)


def _worst(lengths: list[int], groups: int) -> float:
    """The largest difference of outputs and gradients from those of Megatron-LM's recurrence."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm import mamba_mixer

    mamba_mixer.causal_conv1d_update = mamba_mixer.selective_state_update = None  # their fallbacks are in PyTorch
    mixer = _mixer(groups)
    for parameter in (mixer.norm.weight, mixer.D):
        torch.nn.init.normal_(parameter)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = torch.randn(sum(lengths), 1, 16, requires_grad=True)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, total_tokens=sum(lengths))
    output, _ = mixer(inputs, packed_seq_params=packed if len(lengths) > 1 else None)
    alone = []
    for start, stop in pairwise(bounds.tolist()):
        states = [torch.zeros(1, *shape) for shape in mixer.mamba_state_shapes_per_request()]
        for token in range(start, stop):
            with torch.no_grad():
                alone.append(mixer._decode(inputs[token : token + 1], *states)[0])
    differences = [(output - torch.cat(alone)).abs().max().item()]
    weights = torch.randn_like(output)
    watched = [inputs, *mixer.parameters()]
    whole = torch.autograd.grad((weights * output).sum(), watched)
    parts = [mixer(inputs[start:stop])[0] for start, stop in pairwise(bounds.tolist())]
    expected = torch.autograd.grad((weights * torch.cat(parts)).sum(), watched)
    differences += [(one - other).abs().max().item() for one, other in zip(whole, expected, strict=True)]
    assert min(gradient.abs().max().item() for gradient in expected) > 1e-6
    return max(differences)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_megatrons_recurrence(pool, lengths, groups):
    (worst,) = pool.run(1, _worst, lengths, groups)
    assert worst < 1e-13


def _gradient(lengths: list[int]) -> tuple[bool, float]:
    """Whether PyTorch's finite differences agree with the gradients, and the effect of a document on the next one."""
    import torch

    from megatron.balanced.local.mamba import scan

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    tokens = sum(lengths)
    sizes = [(1, tokens, 4, 2), (1, tokens, 4), (4,), (1, tokens, 2, 3), (1, tokens, 2, 3)]
    values, steps, rate, keys, queries = (torch.randn(size) for size in sizes)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    parts = [values, steps.exp(), -rate.exp(), keys, queries]
    parts = [part.requires_grad_() for part in parts]
    agrees = torch.autograd.gradcheck(lambda *given: scan(*given, documents), parts)
    with_state = scan(*parts) - scan(*parts, documents)
    return agrees, with_state[:, lengths[0] :].abs().max().item()


def test_gradients_are_those_of_finite_differences(pool):
    ((agrees, effect),) = pool.run(1, _gradient, [3, 2])
    assert agrees
    assert effect > 1e-3


@pytest.mark.parametrize("method", ["chunks", "zones", "ring", "gather"])
def test_rows_of_all_ranks_become_documents(pool, method):
    (failures,) = pool.run(1, _wrong_rows, method)
    assert failures == []


def _wrong_rows(method: str) -> list[int]:
    """Plans whose rows, put in order, are not one document after the other."""
    from megatron.balanced.sequences.mamba import document_rows

    wrong = []
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 60, 7).tolist()
        plan = plan_sequences(lengths, a800(8), shape=MHA, method=method)
        rows = int(plan.linear_tokens.max()) + 3
        tokens = np.full((8, rows), -1)  # by their place among all documents
        first = np.cumsum([0, *lengths])
        for rank in range(8):
            held = [
                np.arange(shard.start, shard.stop) + first[shard.sequence] for shard in plan.shards(rank, linear=True)
            ]
            tokens[rank, : sum(map(len, held))] = np.concatenate(held)
        order, back, documents = document_rows(plan, 8, rows)
        inside = sum(lengths)
        expected = np.repeat(np.arange(len(lengths) + 1), [*lengths, 8 * rows - inside])
        moved = tokens.flatten()[order]
        same = (moved[:inside] == np.arange(inside)).all() and (moved[inside:] == -1).all()
        if not (same and (order[back] == np.arange(8 * rows)).all() and (documents == expected).all()):
            wrong.append(seed)
    return wrong
