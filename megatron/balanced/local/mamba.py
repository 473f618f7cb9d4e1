"""Mamba layers on CPUs (`M` in `--hybrid-layer-pattern`): stand-ins for the kernels of mamba_ssm, which need a GPU.

Megatron-LM's mixer refuses to be built without mamba_ssm. Here it runs unchanged, on PyTorch functions that compute the
same token by token. They are exact and slow, for tests and small models. On a GPU they are not used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

__all__ = ["ScannedMambaMixer", "kernels", "scan"]


class GatedNorm(torch.nn.Module):
    """The RMS norm of mamba_ssm, over groups of features."""

    def __init__(
        self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.tp_group: Any = None  # which the mixer sets

    def forward(self, tokens: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """tokens and gate [..., size] -> [..., size]."""
        gated = tokens.float() if gate is None else tokens.float() * F.silu(gate.float())
        groups = gated.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(tokens.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """As Megatron-LM's subclass of the norm has it."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


@contextmanager
def kernels() -> Iterator[None]:
    """A context in which Megatron-LM's mixer uses these functions instead of mamba_ssm."""
    with mock.patch.multiple(
        mamba_mixer,
        HAVE_MAMBA_SSM=True,
        ExtendedRMSNorm=GatedNorm,
        mamba_split_conv1d_scan_combined=_convolve_and_scan,
        _check_mamba_sequence_packing_support=lambda **unused: (True, None),
    ):
        yield


class ScannedMambaMixer(mamba_mixer.MambaMixer):
    """Megatron-LM's mixer on CPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with kernels():
            super().__init__(*args, **kwargs)
        self.use_mem_eff_path = True  # the other path has kernels of its own, for the same numbers
        if self.config.params_dtype is torch.float64:  # Megatron-LM builds this one in float32 whatever the precision
            self.A_log.data = self.A_log.data.double()

    def _ssm_training(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with kernels():
            return super()._ssm_training(*args, **kwargs)


def _convolve_and_scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    rate: torch.Tensor,
    *,
    D: torch.Tensor,
    ngroups: int,
    seq_idx: torch.Tensor | None,
    **unused: Any,
) -> torch.Tensor:
    """`mamba_split_conv1d_scan_combined` of mamba_ssm, with its names, for Megatron-LM's call.

    projected: [batch, token, feature], the gate, what is convolved, and the time step of each head.
    weight, bias: of the convolution, [feature, width] and [feature].
    step_bias, rate: [head]. D: of the input that is added to the output, [head] or [head, head_dim].
    ngroups: of heads. seq_idx: int32 [1, token], the number of a token's document; None where a sequence is one.

    Returns [batch, token, head x head_dim].
    """
    heads = len(rate)
    inner = projected.shape[-1] - len(bias) - heads
    states = (len(bias) - inner) // 2
    gate, convolved, steps = projected.float().split([inner, len(bias), heads], dim=-1)
    convolved = F.silu(_convolve(convolved, weight.float(), seq_idx) + bias.float())
    values, keys, queries = (
        part.unflatten(-1, (number, -1))
        for part, number in zip(convolved.split([inner, states, states], -1), (heads, ngroups, ngroups), strict=True)
    )
    found = scan(values, F.softplus(steps + step_bias), rate, keys, queries, seq_idx)
    found = found + D.float().view(heads, -1) * values
    return (found.flatten(-2) * F.silu(gate)).to(projected.dtype)


def _convolve(tokens: torch.Tensor, weight: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """A causal convolution of each feature by itself, within documents.

    tokens: [batch, token, feature]. weight: [feature, width]. documents: as in `scan`.
    """
    output = tokens * weight[:, -1]
    for back in range(1, min(weight.shape[1], tokens.shape[1])):
        before = tokens[:, :-back]
        if documents is not None:
            before = before.masked_fill((documents[:, back:] != documents[:, :-back])[..., None], 0)
        output = output + F.pad(before, (0, 0, back, 0)) * weight[:, -1 - back]
    return output


def scan(
    values: torch.Tensor,
    steps: torch.Tensor,
    rate: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The recurrence of Mamba-2 (arXiv 2405.21060). Each head has a state [head_dim, state_dim], 0 before a document:

        state <- exp(step * rate) * state + step * value key^T
        output = state query

    values: [batch, token, head, head_dim].
    steps: [batch, token, head], lengths of time steps.
    rate: [head], below 0.
    keys, queries: [batch, token, group, state_dim]; each group of heads shares them.
    documents: [1, token], the number of a token's document; None where a sequence is one.

    Returns [batch, token, head, head_dim].
    """
    of_group = values.shape[2] // keys.shape[2]
    keys, queries = (part.repeat_interleave(of_group, dim=2) for part in (keys, queries))
    kept = torch.exp(steps * rate)
    begins = None if documents is None else F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    added = (steps[..., None] * values)[..., None] * keys[..., None, :]
    state, outputs = torch.zeros_like(added[:, 0]), []
    for token in range(values.shape[1]):
        if begins is not None:
            state = state.masked_fill(begins[:, token, None, None, None], 0)
        state = kept[:, token, :, None, None] * state + added[:, token]
        outputs.append((state * queries[:, token, :, None, :]).sum(-1))
    return torch.stack(outputs, dim=1)
