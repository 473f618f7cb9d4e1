"""Sequences in Megatron-LM's trainer. Their flags are checked in `checks.sequences`."""

import argparse

from megatron.training.models.base import ModelConfig
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from balancing.sequences.config import SequenceConfig
from megatron.balanced.run import Run
from megatron.balanced.sequences.attention import use_document_positions
from megatron.balanced.sequences.balancer import SequenceBalancer
from megatron.balanced.sequences.moved_tokens import Batches, MovedTokens
from megatron.balanced.trainer.sequence_rules import routes_by_sample, why_of_one_size, why_whole

__all__ = ["sequences"]

_KERNEL = "balance_attention_kernel"  # of Megatron-LM's arguments, which checkpoints hold


def sequences(
    run: Run,
    args: argparse.Namespace,
    config: SequenceConfig,
    model: ModelConfig,
    resumed: argparse.Namespace | None,
) -> MovedTokens:
    """Let the run balance sequences. Returns how tokens move, for the data loader and the forward step.

    resumed: arguments in the checkpoint; None without one.
    """
    ramped = args.rampup_batch_size or args.step_batch_size_schedule or args.decrease_batch_size_if_needed
    ramped = ramped or args.phase_transition_iterations  # each phase numbers its samples anew
    batches = Batches(
        step_samples=args.global_batch_size,
        numbered=args.dataloader_type == "single" and not ramped,
        group=args.microbatch_group_size_per_vp_stage,
        conversations=bool(args.sft),
        masks_documents=bool(args.dataloader_inter_document_masking),
        whole=why_whole(args) is not None,
        one_size=why_of_one_size(args) is not None,
        tells_samples=routes_by_sample(args, config),
        passes_states="M" in (args.hybrid_layer_pattern or ""),
    )
    tokens = MovedTokens(run, batches, update_seqlen_stats_from_cu_seqlens)

    def build(run: Run) -> SequenceBalancer:
        balancer = SequenceBalancer(
            run.chunks,
            config,
            job=run.job,
            cluster=run.cluster,
            report=run.report,
            tokens=tokens,
            had_kernel=getattr(resumed, _KERNEL, None),
        )
        setattr(args, _KERNEL, balancer.kernel.name)
        return balancer

    run.build.append(build)
    model.pre_wrap_hooks.append(use_document_positions)
    return tokens
