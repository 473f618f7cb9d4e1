"""Bad input found before anything is built, while one clear line can still be said about it.

Megatron-LM meets most of it minutes later, on one of many ranks, as an assertion in a data loader or a process group.
"""

import argparse
import math
import os
import tempfile
from pathlib import Path

from balancing.doctor.installed import find_megatron

__all__ = ["MEGATRON_VERSIONS", "OnThisMachine", "check_folders", "check_layout", "check_megatron"]

MEGATRON_VERSIONS = ("0.19.2",)


class OnThisMachine(ValueError):
    """Bad input that may be bad on this machine alone, such as a missing file."""


def check_megatron() -> None:
    """Raise ValueError unless the Megatron-LM that an import would take is one that this package was written for."""
    found = find_megatron()
    wanted = f"pip install megatron-core=={MEGATRON_VERSIONS[-1]}"
    if found["version"] is None:
        raise ValueError(f"Megatron-LM is not installed; {wanted}")
    if found["version"] not in MEGATRON_VERSIONS:
        raise ValueError(
            f"megatron-core {found['version']} (in {Path(found['core']).parent}) is not supported, only "
            f"{' and '.join(MEGATRON_VERSIONS)}; {wanted}"
        )
    if not found["training"]:
        raise ValueError(f"megatron-core {found['version']} is here without megatron.training; {wanted}")


def check_layout(args: argparse.Namespace) -> None:
    """Raise ValueError when ranks or batch do not divide into the groups asked for, or two precisions are asked for.

    Before Megatron validates `args`, for it does not name the values.
    """
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 contradicts --fp16; drop one of them")
    tensor = args.tensor_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    pipeline = ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size)
    context = ("--context-parallel-size", args.context_parallel_size)
    expert = ("--expert-model-parallel-size", args.expert_model_parallel_size)
    for flags in (
        [("--tensor-model-parallel-size", tensor), pipeline, context],
        [("--expert-tensor-parallel-size", expert_tensor), pipeline, expert],
    ):
        for flag, size in flags:
            if size < 1:
                raise ValueError(f"{flag} {size} must be at least 1")
        product = math.prod(size for _, size in flags)
        if args.world_size % product:
            factors = " x ".join(f"{flag} {size}" for flag, size in flags)
            raise ValueError(
                f"{factors} = {product} does not divide the {args.world_size} rank(s); start a multiple of {product} "
                "(torchrun --nproc-per-node, times nodes) or change the sizes"
            )
    ranks, of_experts = tensor * context[1], expert_tensor * expert[1]
    if args.use_tp_pp_dp_mapping and args.pipeline_model_parallel_size > 1 and ranks != of_experts:
        raise ValueError(
            "--use-tp-pp-dp-mapping needs as many data-parallel ranks for experts as for the rest of the model, but "
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context[1]} = {ranks} and "
            f"--expert-tensor-parallel-size {expert_tensor} x --expert-model-parallel-size {expert[1]} = {of_experts}; "
            "make these equal, or drop --use-tp-pp-dp-mapping"
        )
    instances = args.num_distributed_optimizer_instances
    if instances > 1 and args.overlap_grad_reduce and pipeline[1] > 1 and args.align_grad_reduce:
        raise ValueError(
            f"--num-distributed-optimizer-instances {instances} with --overlap-grad-reduce and {pipeline[0]} "
            f"{pipeline[1]}: Megatron-LM reduces gradients twice, so that they are {instances} times too large; add "
            "--no-align-grad-reduce or drop --overlap-grad-reduce"
        )
    replicas = args.world_size // (tensor * args.pipeline_model_parallel_size * args.context_parallel_size)
    batch, micro_batch = args.global_batch_size, args.micro_batch_size
    adapts = args.decrease_batch_size_if_needed or args.step_batch_size_schedule
    if batch and micro_batch and not adapts and batch % (micro_batch * replicas):
        raise ValueError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro_batch} x {replicas} "
            f"data-parallel rank(s); use one of {micro_batch * replicas}"
        )


def check_folders(args: argparse.Namespace) -> None:
    """Raise ValueError for a folder that cannot be written to. Makes those that are not there."""
    for name in ("balance_report", "save", "tensorboard_dir", "data_cache_path"):
        if getattr(args, name):
            _check_writable(f"--{name.replace('_', '-')} {getattr(args, name)}", getattr(args, name))


def _check_writable(what: str, folder: str) -> None:
    if "://" in folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OnThisMachine(f"{what} cannot be written to ({error.strerror}); name a folder that can") from error
