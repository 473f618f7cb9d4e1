"""Datasets, micro-batches and the loss of GPT: the part of training that Megatron-LM leaves to an entry script.

The datasets, their caches and the broadcast over tensor-parallel ranks are Megatron-LM's. One point differs from its
entry script: with packed or balanced documents every pipeline stage reads the data, since attention in every layer
needs document boundaries.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, print_rank_0
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from balancing.sequences.sequence_plan import SequencePlan

if TYPE_CHECKING:
    from megatron.balanced.observe.observer import Observer
    from megatron.balanced.sequences.moved_tokens import MovedTokens
from megatron.balanced.trainer.prediction import tail_on_stage
from megatron.balanced.trainer.sequence_rules import packs_samples_of_losses

__all__ = ["forward_step", "is_packed", "train_valid_test_datasets"]

_BATCH_KEYS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def is_packed(args: argparse.Namespace) -> bool:
    """Whether a sequence holds several documents that do not attend to each other."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def _stage_reads_data(args: argparse.Namespace, vp_stage: int | None) -> bool:
    everywhere = is_packed(args) or args.balance_sequences
    return everywhere or is_first_or_last_pipeline_stage(vp_stage) or tail_on_stage(args, vp_stage)


def _dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    tokenizer = get_tokenizer()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    options: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "tokenizer": tokenizer,
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "object_storage_cache_path": args.object_storage_cache_path,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "context_parallel_size": 1 if args.balance_sequences else args.context_parallel_size,  # for padding
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    if args.per_dataset_sequences_path:
        import json

        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            options["sequences_per_dataset"] = json.load(file)
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    names = ("prefix", "middle", "suffix", "pad", "eod")
    return GPTFIMDatasetConfig(
        **options,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens={name: getattr(args, f"fim_{name}_token") for name in names},
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def _dataset_class(args: argparse.Namespace) -> type:
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def train_valid_test_datasets(
    sizes: list[int | None], vp_stage: int | None = None, *, everywhere: bool = False
) -> tuple[Any, Any, Any]:
    """Build train, validation and test sets on the ranks that read them.

    sizes: samples of each, None for an epoch.
    everywhere: whether every stage reads data, since it may become the last one.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")

    def reads_data() -> bool:
        reads = _stage_reads_data(args, vp_stage) or everywhere
        return reads and mpu.get_tensor_model_parallel_rank() == 0

    return BlendedMegatronDatasetBuilder(_dataset_class(args), sizes, reads_data, _dataset_config(args)).build()


def _next_batch(
    data_iterator: Iterator | None, vp_stage: int | None, everywhere: bool, samples: int
) -> dict[str, Any] | None:
    """The next micro-batch of this rank, of so many samples, or None on a stage that does not read data."""
    args = get_args()
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    if not _stage_reads_data(args, vp_stage):
        if everywhere and tensor_rank == 0:  # this stage may become the last one, so its iterator must keep pace
            assert data_iterator is not None, "a stage that may have to read data has no data iterator"
            next(data_iterator)
        return None
    batch: dict[str, Any] = {}
    if tensor_rank == 0:
        assert data_iterator is not None, "a stage that reads data has no data iterator"
        sample = next(data_iterator)
        for key in _BATCH_KEYS:
            value = sample.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed(args),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=samples,
        seq_length=args.seq_length,
        mtp_on_this_rank=tail_on_stage(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking,
    )


def _packed_parameters(batch: dict[str, Any], samples: int) -> PackedSeqParams | None:
    if batch.get("cu_seqlens") is None:
        return None
    args = get_args()
    # With tokens_per_sample, MoE layers split a packed micro-batch into its samples again. Under sequence parallelism a
    # rank has no whole samples; there `PackedRouter` tells samples apart.
    takes_apart = packs_samples_of_losses(args) and not args.sequence_parallel
    bounds = batch["cu_seqlens"].squeeze(0)
    padded = batch.get("cu_seqlens_padded")
    padded = None if padded is None else padded.squeeze(0)
    longest = int(batch["max_seqlen"].max())
    update_seqlen_stats_from_cu_seqlens(bounds)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Without total_tokens, Mamba layers would pass their state from one document to the next.
        total_tokens=samples * args.seq_length if "M" in (args.hybrid_layer_pattern or "") else None,
        tokens_per_sample=args.seq_length if takes_apart else None,
    )


def _document_lengths(samples: list[int], packed: PackedSeqParams | None, plan: SequencePlan | None) -> list[int]:
    """Tokens of each document of the current micro-batch, or of each sample if they are not packed: `samples`."""
    if plan is not None:
        return list(plan.lengths)
    if packed is None:
        return samples
    return torch.diff(packed.cu_seqlens_q).tolist()


def _loss(
    loss_mask: torch.Tensor,
    output: torch.Tensor,
    *,
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None,
    training: bool = True,
    count: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum of the losses over unmasked tokens, the number of these tokens, and both as Megatron reports them.

    loss_mask: 1 where a token counts, as many elements as `output`.
    output: the loss of each token, any shape.
    weigh: with balanced sequences, loss mask [row] -> weight of each row. Where Megatron-LM averages over
        micro-batches, the sum is over weighted losses, and the number of tokens is 1.
    training: whether the loss is trained on.
    count: told of the number of unmasked tokens in training.
    """
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    losses = output.reshape(-1).float().masked_fill(mask == 0, 0)  # 0 times NaN is NaN
    total = torch.sum(losses * mask)
    tokens = mask.sum().detach().to(torch.int)
    if training and count is not None:
        count(tokens)
    if args.check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=is_bad,
                message=f"{name} in the loss of a forward pass",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=total,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=10, context="loss"),
            message="the loss jumped",
            tolerance=0.0,
            fatal=False,
        )
    reported = torch.stack([total.detach(), tokens.to(total.dtype)])
    if weigh is not None and (args.sft if not training else not args.calculate_per_token_loss):
        # Megatron-LM averages the result over data- and context-parallel ranks. The weighted losses of these ranks add
        # up to the losses of as many micro-batches as there are data-parallel ranks.
        total = torch.sum(losses * weigh(mask.to(losses.dtype))) * mpu.get_context_parallel_world_size()
        tokens = torch.ones_like(tokens)
        if not training:  # in evaluation, only --sft averages over micro-batches
            reported = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {"lm loss": reported}


def forward_step(
    data_iterator: Iterator | None,
    model: torch.nn.Module,
    return_schedule_plan: bool = False,
    *,
    observer: "Observer | None" = None,
    tokens: "MovedTokens | None" = None,
    everywhere: bool = False,
    count: Callable[[torch.Tensor], None] | None = None,
) -> tuple[Any, Callable]:
    """Run the forward pass of one micro-batch. Returns the output tensor and the loss function, as schedules expect.

    data_iterator: the data iterator of this rank; None on ranks without data.
    model: the model chunk.
    return_schedule_plan: return Megatron-LM's plan of the forward and backward pass instead of the output tensor. The
        schedule then runs the plan in parts (`--overlap-moe-expert-parallel-comm`).
    observer: told of each micro-batch, and of Megatron-LM's plan if that is returned.
    tokens: gives micro-batches whose documents are spread over ranks; None for Megatron-LM's own layout.
    everywhere: as in `train_valid_test_datasets`.
    count: told of the number of tokens with a loss of each trained micro-batch.
    """
    args = get_args()
    timers = get_timers()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    samples = args.micro_batch_size if model.training else args.eval_micro_batch_size
    timers("batch-generator", log_level=2).start()
    batch: dict[str, Any]
    packed: PackedSeqParams | None
    plan: SequencePlan | None = None
    rank, weigh = 0, None
    if tokens is None:
        batch = _next_batch(data_iterator, vp_stage, everywhere, samples) or dict.fromkeys(_BATCH_KEYS)
        packed = _packed_parameters(batch, samples)
    else:
        batch, packed, plan, losses = tokens.next_batch(data_iterator, vp_stage or 0)
        rank, weigh = tokens.sharing.domain.rank, losses.weights
    timers("batch-generator").stop()
    if observer is not None:
        observer.documents(
            partial(_document_lengths, [args.seq_length] * samples, packed, plan), vp_stage or 0, plan, rank
        )
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    if observer is not None and return_schedule_plan:
        observer.parts(output, vp_stage or 0)
    return output, partial(_loss, batch["loss_mask"], weigh=weigh, training=model.training, count=count)
