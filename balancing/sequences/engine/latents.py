"""Keys and values of other ranks' tokens, projected where they are received (multi-latent attention).

Multi-latent attention projects the keys and values of all heads from one latent a token, but for a part of each key
that all heads share (DeepSeek-V2, arXiv 2405.04434, section 2.1). So a latent and a shared part may travel in their
place, which are 71 times less in DeepSeek-V3's shape, and each rank that needs them repeats the projection, in the
backward pass once more. Gradients of received keys become gradients of latents, which travel back, and of the
projection, which stay: its weight is the same on all ranks, and their gradients are added up with all others.

A rank's own keys and values come with the call, however they were projected; no latent of an own token is projected.
"""

from typing import NamedTuple

import torch

from balancing.sequences.engine.call_rows import CallRows
from balancing.sequences.engine.program import Program

__all__ = ["Projection", "is_received", "rows_of_keys", "shared_size"]


class Projection(NamedTuple):
    """From latents to keys and values.

    weight: [heads x (head_size - shared + value_size), latent], of each head's keys without the shared part, then its
        values.
    heads: of keys and values.
    head_size, shared: numbers of a key, and of its shared part, which is its end.
    """

    weight: torch.Tensor
    heads: int
    head_size: int
    shared: int

    def project(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [row, heads, head_size] and values [row, heads, value_size] of rows [row, 1, latent + shared]."""
        latent, shared = self._split(rows)
        projected = (latent @ self.weight.t()).unflatten(1, (self.heads, -1))
        of_head = self.head_size - self.shared
        keys = torch.cat((projected[..., :of_head], shared[:, None].expand(-1, self.heads, -1)), 2)
        return keys, projected[..., of_head:]

    def gradients(
        self, rows: torch.Tensor, of_keys: torch.Tensor, of_values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the rows and of the weight, in `dtype`. rows: as in `project`, whose results had the others."""
        latent, _ = self._split(rows)
        of_head = self.head_size - self.shared
        projected = torch.cat((of_keys[..., :of_head], of_values), 2).flatten(1)
        of_shared = of_keys[..., of_head:].sum(1, dtype=dtype)
        of_rows = torch.cat(((projected @ self.weight).to(dtype), of_shared), 1)
        return of_rows[:, None], (projected.t() @ latent).to(dtype)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.weight.shape[1]
        return rows[:, 0, :size], rows[:, 0, size:]


def shared_size(k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, latent: torch.Tensor) -> int:
    """Numbers of the part of a key that all heads share. Arguments of `SequenceAttention`, whose shapes are checked.

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
    """Of each call of a program: whether its keys are other ranks'. Raises ValueError where a call has both kinds."""
    found = []
    for call in program.calls:
        received = {start >= program.tokens for start, _ in call.keys}
        if len(received) > 1:
            raise ValueError("latents cannot travel under a plan of windows, whose calls have own and received keys")
        found.append(received.pop())
    return tuple(found)


def rows_of_keys(workspace: torch.Tensor, rows: CallRows) -> torch.Tensor:
    """Rows of a call's keys in a workspace."""
    return workspace[rows.keys] if isinstance(rows.keys, slice) else workspace.index_select(0, rows.keys)
