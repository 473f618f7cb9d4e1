"""Multi-token prediction (`--mtp-num-layers`) over documents that are spread over ranks.

The layer of depth k predicts token i + k + 1 of a document from its first i tokens, with the embedding of token i + k
(DeepSeek-V3, arXiv 2412.19437, section 2.2). Megatron-LM shifts tokens, labels and loss masks by one for each layer, in
the rows that a rank holds, and averages the loss over these rows. Under a plan the next token may be on any rank, so
the data loader shifts documents before they are cut (`megatron.balanced.sequences.dataset`). The weight of a token in
the loss is that in the micro-batch for which it was drawn, as for the next token
(`megatron.balanced.sequences.domain`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    MultiTokenPredictionLayer,
    _compute_mtp_acceptance_counts,
)
from megatron.core.utils import make_viewless_tensor

from megatron.balanced.sequences.attention import PlannedSequences
from megatron.balanced.sequences.domain import LossTokens

__all__ = ["LAYERS_OF_TAIL", "Prediction", "PredictionLayer", "with_planned_losses"]


@dataclass(frozen=True)
class Prediction:
    """The rows of a rank shifted in their documents by 0, 1, ... tokens; 0 where a document has ended.

    tokens, labels, positions: int64, each [1, rows].
    masks: masks of the loss, each [1, rows].
    losses: tokens with a loss, by shift.
    """

    tokens: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor, ...]
    losses: LossTokens

    def following(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions, shifted by one more than `tokens`, which is one of the tensors of this object."""
        (shift,) = (shift for shift, shifted in enumerate(self.tokens) if shifted is tokens)
        return self.tokens[shift + 1], self.positions[shift + 1]

    def weights(self, dtype: torch.dtype, per_token: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """[shift, row], the weight of each row in the reported loss, and in the trained loss.

        per_token: whether Megatron-LM divides gradients by the tokens of a step, instead of each loss by the tokens of
            its micro-batch. It then multiplies the average of a micro-batch by its tokens before the shift.
        """
        masks = torch.cat(self.masks)
        counts = self.losses.count(masks)
        # Megatron-LM divides the sum over all ranks by data- times context-parallel ranks, but all ranks together have
        # one loss for each data-parallel rank.
        average = self.losses.by_origin(masks.to(dtype), counts) * mpu.get_context_parallel_world_size()
        if not per_token:
            return average, average
        whole = counts.to(masks.dtype)
        return average, masks.to(dtype) * (whole[0] / whole.clamp(min=1))[:, self.losses.origin].to(dtype)


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's layer of multi-token prediction, with tokens that the data loader has shifted."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Callable[..., torch.Tensor],
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        assert isinstance(packed_seq_params, PlannedSequences) and packed_seq_params.prediction is not None
        assert padding_mask is None, "a planned micro-batch has no padding inside"
        input_ids, position_ids = packed_seq_params.prediction.following(input_ids)
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:  # it is detached, but recomputation needs an input with a gradient
            hidden_states.requires_grad_(True)
        return input_ids, position_ids, None, embedded, hidden_states


LAYERS_OF_TAIL: dict[type, type] = {MultiTokenPredictionLayer: PredictionLayer}  # Megatron-LM's module -> ours


def with_planned_losses(original: Callable) -> Callable:
    """Megatron's `process_mtp_loss`, with the labels and weights of a planned micro-batch."""

    @functools.wraps(original)
    def process_mtp_loss(*, packed_seq_params: Any = None, **rest: Any) -> torch.Tensor:
        if not isinstance(packed_seq_params, PlannedSequences):
            return original(packed_seq_params=packed_seq_params, **rest)
        assert packed_seq_params.prediction is not None
        return _add_losses(packed_seq_params.prediction, **rest)

    return process_mtp_loss


def _add_losses(
    prediction: Prediction,
    *,
    hidden_states: torch.Tensor,
    output_layer: Callable,
    output_weight: torch.Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    config: Any,
    tp_group: Any,
    scale_logits_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    **unused: Any,
) -> torch.Tensor:
    """Hidden states of the next token [rows, 1, hidden]. Their backward pass adds the gradients of the other losses.

    hidden_states: outputs of all depths, one after another, [(1 + depths) x rows, 1, hidden].
    The other arguments are those of Megatron-LM's `process_mtp_loss`.
    """
    hidden_states, *ahead = hidden_states.chunk(1 + config.mtp_num_layers)
    if config.mtp_detach_heads:
        output_weight = (output_layer.weight if output_weight is None else output_weight).detach()
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    for shift, states in enumerate(ahead, start=1):
        logits, _ = output_layer(states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        if scale_logits_fn is not None:
            logits = scale_logits_fn(logits)
        labels, mask = prediction.labels[shift], prediction.masks[shift]
        losses = compute_language_model_loss(labels, logits).masked_fill(mask == 0, 0)
        if weights is None:
            weights = prediction.weights(losses.dtype, config.calculate_per_token_loss)
        average, trained = (kind[shift] for kind in weights)
        if is_training:
            correct, total = _compute_mtp_acceptance_counts(
                logits, labels, mask, output_layer, runtime_gather_output, tp_group
            )
            MTPLossLoggingHelper.save_metrics_to_tracker(
                torch.sum(losses * average),
                correct,
                total,
                shift - 1,
                config.mtp_num_layers,
                avg_group=mpu.get_data_parallel_group(with_context_parallel=True),
            )
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        hidden_states = MTPLossAutoScaler.apply(hidden_states, scale * (losses * trained))
    return hidden_states
