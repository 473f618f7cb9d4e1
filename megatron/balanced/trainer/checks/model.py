"""Checks of flags of the model that Megatron-LM would ignore, train wrongly with, or fail with after the start."""

import argparse

from balancing.doctor.installed import find_apex
from megatron.balanced.shared.incompatible import shown
from megatron.balanced.trainer.checks.hybrid import check_hybrid
from megatron.balanced.trainer.prediction import check_packed_tail
from megatron.balanced.trainer.sequence_rules import balancing_losses

__all__ = ["check_groups", "check_layout", "check_model", "settle_graphs"]


def settle_graphs(args: argparse.Namespace) -> None:
    """Give CUDA graphs of whole iterations their present name. Megatron-LM does so while it validates `args`, which is
    later than checks read it."""
    for name in ("cuda_graph_modules", "cuda_graph_scope_deprecated"):
        if "full_iteration" in (getattr(args, name) or []) and args.cuda_graph_impl in ("none", "local"):
            args.cuda_graph_impl = "full_iteration"
            setattr(args, name, [module for module in getattr(args, name) if module != "full_iteration"])


def check_layout(args: argparse.Namespace) -> None:
    """Raise ValueError for a layout with which Megatron-LM trains wrongly or fails with a misleading message. Called
    before it validates `args`."""
    instances, stages = args.num_distributed_optimizer_instances, args.pipeline_model_parallel_size
    if instances > 1 and args.overlap_grad_reduce and stages > 1 and args.align_grad_reduce:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} with --overlap-grad-reduce and "
            f"--pipeline-model-parallel-size {stages}: Megatron-LM reduces gradients twice, so that they are "
            f"{instances} times too large; add --no-align-grad-reduce or drop --overlap-grad-reduce"
        )
    layers = (args.num_layers or stages) + sum(
        (args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split)
    )
    if layers < stages and not (args.pipeline_model_parallel_layout or args.hybrid_layer_pattern):
        raise ValueError(
            f"--pipeline-model-parallel-size {stages} is more than --num-layers {args.num_layers}; use at most {layers}"
        )


def check_groups(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes with which Megatron-LM cannot form its process groups. It tells while it forms them,
    and a dry run forms none. Called after it has validated `args`."""
    stages, instances = args.pipeline_model_parallel_size, args.num_distributed_optimizer_instances
    tensor, experts = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    given = (
        f"--expert-tensor-parallel-size {tensor} x --expert-model-parallel-size {experts} x "
        f"--pipeline-model-parallel-size {stages}"
    )
    replicas, rest = divmod(args.world_size, tensor * experts * stages * args.expert_gtp_weight_remat_size)
    if rest:
        raise ValueError(f"{args.world_size} ranks are not a multiple of {given}; lower one of them")
    if args.use_tp_pp_dp_mapping and stages > 1 and replicas != args.data_parallel_size:
        raise ValueError(
            f"--use-tp-pp-dp-mapping in a pipeline needs as many replicas of experts as of other layers, "
            f"{args.data_parallel_size}, and {given} makes {replicas}; drop it"
        )
    shared = {"data- and context-parallel ranks": args.data_parallel_size * args.context_parallel_size}
    for what, number in (shared | {"replicas of experts": replicas}).items():
        if number % instances:
            raise ValueError(f"--num-distributed-optimizer-instances {instances} does not divide the {number} {what}")


# Flags that Megatron-LM 0.19.2 reads in programs that call it otherwise, or nowhere -> what comes of that.
_UNREAD = {
    "apply_residual_connection_post_layernorm": "residuals are added before norms all the same",
    "freeze_all_layers": "all layers would train",
    "log_straggler": "its timer counts nothing, and divides by that; use --balance-report",
    "logits_load_dir": "losses would not be those of distillation",
    "moe_use_upcycling": "the dense model would be built with experts",
    "openai_gelu": "GELU is exact all the same",
}


def check_model(args: argparse.Namespace) -> None:
    """Raise ValueError for a model that cannot be trained as the flags say. Called before Megatron validates `args`."""
    check_hybrid(args)
    _check_late_failures(args)
    _check_dense_layers(args)
    if args.lazy_mpu_init:
        raise ValueError("--lazy-mpu-init leaves process groups to a program around Megatron-LM; drop it")
    if args.train_iters and not args.eval_interval and not args.full_validation and not args.skip_train:
        raise ValueError(
            f"--train-iters {args.train_iters} needs an interval of validation, and --eval-interval is not given; add "
            "--eval-interval 1000, with --eval-iters 0 to leave validation out"
        )
    if args.sft or args.dataloader_inter_document_masking:
        _check_packed(args)
    graphs = args.cuda_graph_impl == "transformer_engine" or args.external_cuda_graph
    if graphs and args.transformer_impl == "local" and args.pipeline_model_parallel_size > 1:
        # Stages without data have no attention mask, and Megatron-LM would replay attention with an empty one.
        raise ValueError(
            "--cuda-graph-impl transformer_engine is incompatible with --transformer-impl local in a pipeline: "
            "attention would see future tokens; use --transformer-impl transformer_engine, or drop it"
        )


def _check_late_failures(args: argparse.Namespace) -> None:
    """Refuse flags at which Megatron-LM 0.19.2 fails late: while it builds the model, or in the first step."""
    ends = {
        name: getattr(args, name) or 0
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    }
    if sum(ends.values()) > args.num_layers:
        most = max(ends, key=lambda name: ends[name])
        raise ValueError(
            f"{shown(most, ends[most])} leaves a negative number of layers for other stages of --num-layers "
            f"{args.num_layers}; lower it"
        )
    if args.decoder_seq_length is not None and args.decoder_seq_length != args.seq_length:
        raise ValueError(
            f"--decoder-seq-length {args.decoder_seq_length} is for a decoder beside an encoder: messages between "
            f"pipeline stages would have its length, and layers --seq-length {args.seq_length}; drop it"
        )
    if args.tokenizer_type in ("MultimodalTokenizer", "NullMultimodalTokenizer"):
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} is for a model of images and text, which another program trains; "
            "use a tokenizer of text"
        )
    if args.checkpoint_activations:
        raise ValueError("--checkpoint-activations is no longer valid; use --recompute-activations")
    if args.init_model_with_meta_device and not args.use_torch_fsdp2 and not args.use_megatron_fsdp:
        raise ValueError("--init-model-with-meta-device leaves weights uninitialized without FSDP; drop it")
    for name, outcome in _UNREAD.items():
        if getattr(args, name, None):
            raise ValueError(f"{shown(name, getattr(args, name))} is not supported here: {outcome}; drop it")
    if args.logits_save_dir is not None and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"--logits-save-dir {args.logits_save_dir} is incompatible with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}: Megatron-LM looks for the head on every stage; use 1"
        )
    turned = int((args.kv_channels or 0) * args.rotary_percent)
    if args.position_embedding_type == "rope" and turned % 2:
        raise ValueError(
            f"--kv-channels {args.kv_channels} gives rotary embeddings {turned} dimensions of a head, and they need an "
            "even number; use another size"
        )
    half = args.bf16 or args.fp16
    if args.fp32_residual_connection and half and args.transformer_impl == "local" and find_apex()["state"] != "ok":
        raise ValueError(
            "--fp32-residual-connection needs norms of Transformer Engine or Apex, which are not installed or not "
            f"selected, beside {'--bf16' if args.bf16 else '--fp16'}; drop one of them"
        )


def _check_dense_layers(args: argparse.Namespace) -> None:
    """Refuse widths of dense layers that --swiglu cannot halve. Megatron-LM rounds the default width down to a multiple
    of 64, which may be 0. It halves the part of each tensor-parallel rank even if all layers have experts."""
    tensor = args.tensor_model_parallel_size
    if args.swiglu and args.ffn_hidden_size is not None and args.ffn_hidden_size // tensor % 2:
        raise ValueError(
            f"--ffn-hidden-size {args.ffn_hidden_size} with --swiglu must be a multiple of {2 * tensor}: each of "
            f"{tensor} tensor-parallel rank(s) halves its part"
        )
    every = args.moe_layer_freq if isinstance(args.moe_layer_freq, list) else [args.moe_layer_freq]
    has_dense = not args.num_experts or any(number != 1 for number in every)
    if args.swiglu and has_dense and args.ffn_hidden_size is None and int(4 * args.hidden_size * 2 / 3) < 64:
        raise ValueError(
            f"--hidden-size {args.hidden_size} with --swiglu leaves dense layers no hidden units: Megatron-LM makes "
            "them multiples of 64; give --ffn-hidden-size"
        )


def _check_packed(args: argparse.Namespace) -> None:
    """Refuse flags with which Megatron-LM fails late on packed documents, or trains them wrongly."""
    packs = "--sft" if args.sft else "--dataloader-inter-document-masking"
    check_packed_tail(args, packs)
    several = (args.micro_batch_size or 1) > 1 and args.context_parallel_size > 1
    if several and "seq_aux_loss" in balancing_losses(args) and not args.balance_sequences:
        raise ValueError(
            f"--micro-batch-size {args.micro_batch_size} with {packs} and --context-parallel-size "
            f"{args.context_parallel_size} is incompatible with --moe-router-load-balancing-type seq_aux_loss: ranks "
            "have pieces of samples, and Megatron-LM would mix these; use --micro-batch-size 1, or add "
            "--balance-sequences"
        )
