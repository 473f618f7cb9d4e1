"""Router losses of a micro-batch or of a sample, if ranks share micro-batches.

`aux_loss` multiplies two sums over the tokens of a micro-batch, for each expert: the tokens routed to it, and the
scores of the router for it (Switch Transformer, arXiv 2101.03961, section 2.2). `seq_aux_loss` is the same for each
sample (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Megatron-LM's router takes the rows of its tensor- and
context-parallel ranks for the micro-batch. If data-parallel ranks share micro-batches, these rows come from several
micro-batches of Megatron-LM. The rows of a packed micro-batch also have no dimension of samples.

Here a token belongs to the sample in which it was drawn, wherever it is. Tokens of each expert are counted by sample
and added up over the ranks of the domain, int32 [samples, experts]. Scores are not sent: each rank's part of the loss
is the product of its own scores with the counts of all ranks. Sum, scaling and log are Megatron-LM's.

Without balanced sequences only `seq_aux_loss` needs this, for packed micro-batches of several samples under sequence
parallelism. Megatron-LM separates the samples by the length of a whole one, but a rank has only a part of each.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megatron.balanced.sequences.attention import CurrentBatch, PlannedSequences, SampleRows, SequenceCoreAttention
from megatron.balanced.shared.recompute import Replays

__all__ = ["PackedRouter", "PlannedMoELayer", "SampleRouter", "loss_of_parts", "tell_routers", "tokens_of_parts"]

_LOGGED = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}  # in Megatron-LM's log


class PackedRouter(TopKRouter):
    """Megatron-LM's router with `seq_aux_loss` of each sample of a packed micro-batch under sequence parallelism.

    The rows of the tensor-parallel ranks, one rank after the other, are the samples of the micro-batch.
    """

    def __init__(self, *args: Any, tokens_per_sample: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens_per_sample = tokens_per_sample

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        rows = len(routing_map)
        samples, rest = divmod(rows * self.tp_group.size(), self._tokens_per_sample)
        assert bsz == 1 and not rest, f"{rows} rows cannot be split into samples of {self._tokens_per_sample} tokens"
        first = self.tp_group.rank() * rows
        sample = torch.arange(first, first + rows, device=routing_map.device) // self._tokens_per_sample
        routed = scores_for_aux_loss, routing_map
        return _with_loss(self, "seq_aux_loss", probs, *routed, _Parts(sample, samples, [self.tp_group]))


class SampleRouter(TopKRouter):
    """Megatron-LM's router with losses of the samples and micro-batches that tokens were drawn in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.current = CurrentBatch()  # of this layer
        self._passes: Replays[PlannedSequences | None] = Replays()
        self._planned: PlannedSequences | None = None  # of the pass in progress

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """As Megatron-LM's. The micro-batch is the one that passes through the layer; if experts are recomputed without
        attention, the one of the pass that is recomputed."""
        if self.training and (torch.is_grad_enabled() or input.requires_grad):  # a frozen layer's input requires none
            self._planned, _ = self._passes.decide(lambda: self.current.planned)
        return super().forward(input, padding_mask)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        drawn = self._drawn
        routed = scores_for_aux_loss, routing_map
        return self._of_parts("aux_loss", probs, *routed, samples_of_part=drawn.samples // drawn.origins)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        routed = scores_for_aux_loss, routing_map
        return self._of_parts("seq_aux_loss", probs, *routed, samples_of_part=1)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of each expert for its bias, without rows of padding."""
        planned, rows = self._planned, len(routing_map)
        if torch.is_grad_enabled() and planned is not None:
            assert planned.positions is not None and planned.attention is not None
            every, tokens = len(planned.positions.rows), planned.attention.tokens
            if tokens < every:
                first = self.tp_group.rank() * rows if rows < every else 0
                place = torch.arange(first, first + rows, device=routing_map.device)
                routing_map = routing_map & (place < tokens)[:, None]
        super()._apply_expert_bias(routing_map, padding_mask=padding_mask)

    def _of_parts(
        self,
        kind: str,
        probs: torch.Tensor,
        scores: torch.Tensor,
        routing_map: torch.Tensor,
        samples_of_part: int,
    ) -> torch.Tensor:
        """`_with_loss` of a part for each `samples_of_part` samples; a micro-batch has the mean of its parts."""
        drawn, rows = self._drawn, len(routing_map)
        samples = drawn.rows
        if rows < len(samples):  # under sequence parallelism
            samples = samples[self.tp_group.rank() * rows :][:rows]
        if drawn.process_group is None:
            process_groups = [self.tp_dp_cp_group if drawn.origins > 1 else self.tp_cp_group]
        else:
            process_groups = [drawn.process_group, self.tp_group]
        number = drawn.samples // samples_of_part
        parts = _Parts(samples // samples_of_part, number, process_groups, drawn.origins)
        return _with_loss(self, kind, probs, scores, routing_map, parts)

    @property
    def _drawn(self) -> SampleRows:
        assert self._planned is not None and self._planned.samples is not None
        return self._planned.samples


class PlannedMoELayer(MoETransformerLayer):
    """A layer of a hybrid model that has only experts. It tells its router the micro-batch."""

    def forward(self, *args: Any, packed_seq_params: PlannedSequences | None = None, **kwargs: Any) -> Any:
        self.mlp.router.current.planned = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def tell_routers(model: torch.nn.Module) -> None:
    """Give the routers of a model the micro-batches that the attention of their layers gets. Megatron-LM gives routers
    hidden states only."""
    for layer in model.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        attention = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if isinstance(router, SampleRouter) and isinstance(attention, SequenceCoreAttention):
            router.current = attention.current


class _Parts(NamedTuple):
    """The parts of a micro-batch that have losses of their own.

    part, number, process_groups: `part`, `parts` and `process_groups` of `tokens_of_parts`.
    micro_batches: Megatron-LM's, that the parts are of.
    """

    part: torch.Tensor
    number: int
    process_groups: Iterable[dist.ProcessGroup]
    micro_batches: int = 1


def _with_loss(
    router: TopKRouter,
    kind: str,
    probs: torch.Tensor,
    scores: torch.Tensor,
    routing_map: torch.Tensor,
    parts: _Parts,
) -> torch.Tensor:
    """`probs` with a loss attached. Added up over the ranks of all process groups, it is the sum over Megatron-LM's
    micro-batches of the mean over their parts.

    kind: of `--moe-router-load-balancing-type`.
    probs, scores: float [row, expert].
    routing_map: bool [row, expert].
    """
    coefficient = router.get_aux_loss_coeff(kind)
    if not coefficient:
        return probs
    tokens = tokens_of_parts(routing_map, parts.part, parts.number, parts.process_groups)
    loss = loss_of_parts(scores, tokens, parts.part, router.topk) * (coefficient * parts.micro_batches / parts.number)
    return router.attach_and_log_load_balancing_loss(
        probs, coefficient, loss, _LOGGED[kind], router.tp_cp_group, valid_token_count=len(routing_map)
    )


def tokens_of_parts(
    routing_map: torch.Tensor, part: torch.Tensor, parts: int, process_groups: Iterable[dist.ProcessGroup]
) -> torch.Tensor:
    """int32 [part, expert], tokens of each part that all ranks of `process_groups` route to each expert.

    routing_map: bool [row, expert].
    part: int [row], of this rank's rows.
    parts: their number.
    process_groups: the tokens are added up over one after the other. All of their ranks call this together.
    """
    tokens = torch.zeros(parts, routing_map.shape[1], dtype=torch.int32, device=routing_map.device)
    tokens.index_add_(0, part, routing_map.to(torch.int32))  # whole numbers: the same in every order
    for process_group in process_groups:
        if process_group.size() > 1:
            dist.all_reduce(tokens, group=process_group)
    return tokens


def loss_of_parts(scores: torch.Tensor, tokens: torch.Tensor, part: torch.Tensor, topk: int) -> torch.Tensor:
    """This rank's share of the load balancing losses of all parts together, a scalar, with coefficient 1.

    scores: float [row, expert], of this rank's rows.
    tokens: int [part, expert], on all ranks.
    part: int [row].
    topk: experts of a token.
    """
    counts = tokens.to(scores.dtype)
    total = counts.sum(dim=1, keepdim=True).clamp(min=1) / topk  # a part may have no token
    weight = counts * (scores.shape[1] / (topk * total * total))
    return (scores * weight.index_select(0, part)).sum()
