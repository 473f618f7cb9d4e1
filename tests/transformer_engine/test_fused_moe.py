"""The stand-ins for Transformer Engine's fused permutation have its parameters and give what its kernels give."""

import inspect

import pytest

from tests.support.command import run_python
from tests.support.packages_apart import why_missing
from tests.support.stand_ins.fused_moe import STAND_INS, moe_unpermute


def _parameters() -> dict[str, list[str]]:
    from transformer_engine.pytorch import permutation, router

    owners = {name: permutation if hasattr(permutation, f.__name__) else router for name, f in STAND_INS.items()}
    return {
        name: list(inspect.signature(getattr(owners[name], function.__name__)).parameters)
        for name, function in STAND_INS.items()
    }


def test_parameters_are_transformer_engines(engine):
    (theirs,) = engine.run(1, _parameters)
    assert theirs == {name: list(inspect.signature(function).parameters) for name, function in STAND_INS.items()}


def compare() -> None:
    """Run Transformer Engine's Triton kernels, interpreted, and the stand-ins on the same tokens."""
    import torch

    from megatron.balanced.cpu.device import use_cpu
    from tests.support.transformer_engine import install

    use_cpu()
    install()
    from transformer_engine.common.triton import permutation as kernels
    from transformer_engine.pytorch import permutation

    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):  # tuning them would take a GPU
            kernel.configs = kernel.configs[:1]
    torch.manual_seed(0)
    tokens, experts, k = 20, 6, 3
    chosen = torch.rand(tokens, experts).topk(k, dim=1).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.rand(tokens, experts) * routing_map
    hidden, weights = torch.randn(tokens, 16), torch.randn(tokens, 16)
    for padded in (False, True):
        results = []
        for get in (lambda f: getattr(permutation, f.__name__), lambda f: f):
            inputs = hidden.clone().requires_grad_(), probs.clone().requires_grad_()
            offsets = None
            if padded:
                counts = routing_map.sum(0)
                permute = get(STAND_INS["fused_permute_and_pad_with_probs"])
                rows, weight, where, offsets, target = permute(*inputs, routing_map, counts, 4)
                assert int(target.sum()) == len(rows) > tokens * k
            else:
                permute = get(STAND_INS["fused_permute_with_probs"])
                rows, weight, where = permute(*inputs, routing_map, num_out_tokens=tokens * k)
            back = get(moe_unpermute)(rows * weight[:, None], where, restore_shape=hidden.shape, pad_offsets=offsets)
            gradients = torch.autograd.grad((back * weights).sum(), inputs)
            routed = torch.arange(experts) < where[:, -1:]
            where = torch.cat([where[:, :experts] * routed, where[:, experts:-1] * routed, where[:, -1:]], dim=1)
            results.append([rows, weight, where, back, *gradients])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(theirs, ours)
    sizes, order = torch.tensor([5, 0, 3, 12]), torch.tensor([2, 0, 3, 1])
    arguments = hidden, torch.rand(tokens), sizes, order
    name = "moe_sort_chunks_by_index_with_probs"
    ours = STAND_INS["fused_sort_chunks_by_index_with_probs"](*arguments)
    torch.testing.assert_close(getattr(permutation, name)(*arguments), ours, rtol=0, atol=0)
    print("alike")


def test_the_stand_ins_permute_like_the_kernels():
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    pytest.importorskip("triton", reason="needs triton: not installed")
    if why := why_missing("transformer_engine", "Transformer Engine"):
        pytest.skip(why)
    done = run_python("-c", f"from {__name__} import compare; compare()", TRITON_INTERPRET="1")
    assert done.returncode == 0 and "alike" in done.stdout, done.stderr[-4000:]
