"""Checks whether a balancer supports a finished model, before the balancer changes anything.

Its configs are checked by the rows of `megatron.balanced.shared.incompatible`, its wrapping and process groups here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config, unwrap_model

from megatron.balanced.shared.incompatible import ATTENTION, EXPERTS, LATE, LAYERS, LOOPS, TRAINER, refused

__all__ = ["check_configs", "check_model", "mark_model", "unmark_model"]

_FEATURES = {"ExpertBalancer": EXPERTS, "SequenceBalancer": ATTENTION, "LayerBalancer": LAYERS, "late_slots": LATE}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}
_MARK = "balanced_by"  # attribute of a model chunk: class names of its balancers


def check_model(
    kind: str,
    chunks: Sequence[torch.nn.Module],
    optimizer: Any = None,
    *,
    config: Any = None,
    recaptures: bool = False,
    wrapped: bool = True,
) -> None:
    """Raise ValueError if a balancer of class `kind` does not support the model chunks. The message is one line, with
    the way out.

    optimizer: the optimizer of the model, if the balancer needs it.
    config: the balancer's; None for the defaults.
    recaptures: as in `Job`.
    wrapped: whether the chunks must be in `DistributedDataParallel`. Megatron-LM does not wrap a model that it only
        validates.
    """
    if config is not None and not config.enabled:
        name = type(config).__name__
        raise ValueError(f"{kind} got {name}(enabled=False), and balances where it is made; set enabled=True")
    for chunk in chunks:
        if wrapped:
            _check_wrapped(chunk)
        if kind in vars(chunk).get(_MARK, ()):
            raise ValueError(
                f"the model has a balancer of class {kind} already; close() its Balancers before another one"
            )
        if kind == "LayerBalancer":
            _check_decoder(chunk)
    _check_groups(chunks)
    optimizer_config = getattr(optimizer, "config", None)
    configs = get_model_config(chunks[0]), getattr(chunks[0], "ddp_config", None), optimizer_config
    check_configs(kind, *configs, recaptures=recaptures)
    for chunk in [] if recaptures else chunks:
        for module in chunk.modules():
            if getattr(module, "cuda_graphs", None) or hasattr(module, "cudagraph_manager"):
                raise ValueError(
                    f"a {type(module).__name__} of the model has CUDA graphs already: a captured graph repeats "
                    f"the plain model; make the {kind} first, and capture none"
                )


def mark_model(kind: str, chunks: Sequence[torch.nn.Module]) -> None:
    """Record that the chunks have a balancer of class `kind`, until `unmark_model`."""
    for chunk in chunks:
        vars(chunk).setdefault(_MARK, set()).add(kind)


def unmark_model(kind: str, chunks: Sequence[torch.nn.Module]) -> None:
    """Allow another balancer of class `kind` on the chunks."""
    for chunk in chunks:
        vars(chunk).get(_MARK, set()).discard(kind)


def _check_wrapped(chunk: torch.nn.Module) -> None:
    if isinstance(chunk, DistributedDataParallel):
        return
    name = type(chunk).__name__
    if "FullySharded" in name or "FSDP" in name:
        raise ValueError(
            f"a model chunk in {name} cannot be balanced, since it shards the parameters of a layer over ranks; use "
            "megatron.core's DistributedDataParallel with use_distributed_optimizer"
        )
    raise ValueError(
        f"a model chunk of class {name} cannot be balanced; wrap it in megatron.core's DistributedDataParallel first"
    )


def _check_decoder(chunk: torch.nn.Module) -> None:
    """Raise ValueError for a model with layers beside its decoder, or with its decoder inside of a part of it. The time
    of a vision tower is not measured, and the first layers may need what it computes, which stays on the first stage.
    """
    model = unwrap_model(chunk)
    for name, module in model.named_modules():
        if isinstance(module, TransformerBlock) and name != "decoder":
            raise ValueError(
                f"layers of a {type(model).__name__} cannot move, since it has some in {name} and not only in "
                "decoder, as a GPTModel has; drop the LayerBalancer"
            )


def _check_groups(chunks: Sequence[torch.nn.Module]) -> None:
    """Balancers use the process groups of `parallel_state`. Raise ValueError if the model was built with others."""
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "megatron.core.parallel_state has no process groups, but balancers use them; call "
            "initialize_model_parallel with the sizes of the model"
        )
    theirs = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
    }
    for model in unwrap_model(list(chunks)):
        model_groups = getattr(model, "pg_collection", None)
        for name, process_group in theirs.items():
            own = getattr(model_groups, name, None)
            if isinstance(own, list) or isinstance(process_group, list) or own is None:
                continue
            ranks, others = dist.get_process_group_ranks(own), dist.get_process_group_ranks(process_group)
            if ranks != others:
                raise ValueError(
                    f"the model's process group {name} has ranks {ranks}, and that of megatron.core.parallel_state "
                    f"{others}; call initialize_model_parallel with the sizes of the model"
                )


def check_configs(kind: str, *configs: Any, recaptures: bool = False) -> None:
    """Raise ValueError for a value in `configs` that a balancer of class `kind`, or the setting late_slots, does not
    support. A config may be None. recaptures: as in `Job`; only the loop of `pretrain_gpt.py` does."""
    known: dict[str, Any] = {}
    for config in configs:
        known |= {} if config is None else vars(config)
    # How weights are stored. Without a distributed optimizer a loop may leave the flag of data parallelism out.
    known |= {f"{name}_gather": True for name in ("fp8_param", "fp4_param") if known.get(name)}
    known = {
        name: _DTYPES.get(value, value) if isinstance(value, torch.dtype) else value for name, value in known.items()
    }
    rows = refused(known, _FEATURES[kind], TRAINER if recaptures else LOOPS)
    if rows:
        row = rows[0]
        raise ValueError(f"{kind} is incompatible with {row.flag}={known[row.flag]}: {row.why}; {row.instead_of_field}")
