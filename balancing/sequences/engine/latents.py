"""Multi-latent attention: keys and values of other ranks' tokens, projected from received latents.

Multi-latent attention projects the keys and values of all heads from one latent a token, except a part of each key that
all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1). Sending the latent and the shared part instead of keys and
values takes 71 times fewer bytes in DeepSeek-V3's shape. Each rank that receives them repeats the projection, in the
backward pass once more. Gradients of received keys become gradients of latents, which are sent back, and of the
projection's weight, which are not: the weight is the same on all ranks, and training sums its gradients over ranks.

A rank's own keys and values are arguments of the call, so latents of own tokens are not projected here.
"""

from typing import NamedTuple

import torch

from balancing.sequences.engine.program import Program

__all__ = ["Projection", "is_received", "shared_size"]


class Projection(NamedTuple):
    """The projection from latents to keys and values.

    weight: [heads x (head_size - shared + value_size), latent]; for each head the key without the shared part, then the
        value.
    heads: of keys and values.
    head_size: elements of a key.
    shared: elements of a key's shared part, at its end.
    """

    weight: torch.Tensor
    heads: int
    head_size: int
    shared: int

    def project(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [row, heads, head_size] and values [row, heads, value_size] of rows [row, 1, latent + shared]."""
        latent, shared = self._split(rows)
        projected = (latent @ self.weight.t()).view(len(rows), self.heads, self.weight.shape[0] // self.heads)
        projected_size = self.head_size - self.shared
        keys = torch.cat((projected[..., :projected_size], shared[:, None].expand(-1, self.heads, -1)), 2)
        return keys, projected[..., projected_size:]

    def gradients(
        self, rows: torch.Tensor, dkeys: torch.Tensor, dvalues: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the rows and of the weight, in `dtype`.

        rows: as in `project`.
        dkeys, dvalues: gradients of the results of `project`.
        """
        latent, _ = self._split(rows)
        projected_size = self.head_size - self.shared
        projected = torch.cat((dkeys[..., :projected_size], dvalues), 2).flatten(1)
        dshared = dkeys[..., projected_size:].sum(1, dtype=dtype)
        drows = torch.cat(((projected @ self.weight).to(dtype), dshared), 1)
        return drows[:, None], (projected.t() @ latent).to(dtype)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.weight.shape[1]
        return rows[:, 0, :size], rows[:, 0, size:]


def shared_size(k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, latent: torch.Tensor) -> int:
    """Elements of the part of a key that all heads share. The arguments are those of `SequenceAttention`.

    Raises ValueError for a weight that does not project latents to keys and values of these heads.
    """
    shared = k.shape[2] + v.shape[2] - weight.shape[0] // k.shape[1]
    if weight.shape[0] % k.shape[1] or not 0 <= shared <= k.shape[2] or latent.shape != (len(k), weight.shape[1]):
        raise ValueError(
            f"a weight {list(weight.shape)} does not project latents {list(latent.shape)} to keys {list(k.shape)} and "
            f"values {list(v.shape)}"
        )
    return shared


def is_received(program: Program) -> tuple[bool, ...]:
    """[call], whether the keys of the call are of other ranks. Raises ValueError for a call with own and other keys."""
    calls = []
    for call in program.calls:
        received = {start >= program.tokens for start, _ in call.keys}
        if len(received) > 1:
            raise ValueError("latents cannot be sent with a sliding window: a call has own and received keys")
        calls.append(received.pop())
    return tuple(calls)
