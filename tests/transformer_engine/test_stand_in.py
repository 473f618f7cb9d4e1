"""What stands in for Transformer Engine's C++ module computes what torch does, and fails where nothing stands in."""

from typing import Any

import pytest


def _calls(name: str) -> None:
    import transformer_engine_torch

    getattr(transformer_engine_torch, name)(1, 2, three=3)


def test_what_is_not_stood_in_for_fails_by_its_name(engine):
    with pytest.raises(NotImplementedError, match="moe_permute_fwd has no stand-in"):
        engine.run(1, _calls, "moe_permute_fwd")


def _largest_difference(optimizer: str, dtype: str, flags: dict[str, Any]) -> float:
    """Of parameters stepped five times by FusedAdam, and by torch's optimizer of that name in float32."""
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    start = [torch.randn(shape).to(getattr(torch, dtype)) for shape in ((5, 7), (11,))]
    ours = [torch.nn.Parameter(part.clone()) for part in start]
    theirs = [torch.nn.Parameter(part.float()) for part in start]
    options = {"lr": 0.1, "weight_decay": 0.1}
    fused = FusedAdam(ours, **options, **flags)
    reference = getattr(torch.optim, optimizer)(theirs, **options)
    for _ in range(5):
        for own, their in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape).to(own.dtype)
            their.grad = own.grad.float()
        fused.step()
        reference.step()
    assert fused.param_groups[0]["step"] == 5
    main = [fused.state[own].get("master_param", own) for own in ours]
    return max((a.float() - b).abs().max().item() for a, b in zip(main, theirs, strict=True))


@pytest.mark.parametrize(
    "optimizer, dtype, flags",
    [
        ("AdamW", "float32", {}),
        ("Adam", "float32", {"adam_w_mode": False}),
        ("AdamW", "bfloat16", {"master_weights": True}),
    ],
)
def test_fused_adam_steps_as_torch_does(engine, optimizer, dtype, flags):
    (difference,) = engine.run(1, _largest_difference, optimizer, dtype, flags)
    assert difference <= 1e-5


def _grouped_as_linear(counts: list[int]) -> float:
    """The largest difference of outputs and gradients, with biases and with groups that have no rows."""
    import torch
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    grouped = te.GroupedLinear(len(counts), 16, 8, bias=True, device="cpu")
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    parameters = dict(grouped.named_parameters())
    parts = [
        torch.nn.functional.linear(part, parameters[f"weight{i}"], parameters[f"bias{i}"])
        for i, part in enumerate(rows.split(counts))
    ]
    results = []
    for out in (grouped(rows, counts), torch.cat(parts)):
        results.append([out, *torch.autograd.grad(out.square().sum(), [rows, *parameters.values()])])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def test_grouped_products_are_those_of_each_group(engine):
    (difference,) = engine.run(1, _grouped_as_linear, [3, 0, 4, 1])
    assert difference <= 1e-4
