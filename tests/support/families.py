"""One recipe of each family of Megatron-Bridge's performance recipes, small enough to train on a CPU.

`bridge_recipes` reads its flags, `shrink` makes them small. What neither can keep is in `CHANGED`, with the reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.support.shrink import Small, shrink

__all__ = ["CANNOT_TRAIN", "CHANGED", "Change", "Chosen", "changes", "small_of"]

_TAIL = "mtp_num_layers"

# Family -> why no recipe of it is trained.
CANNOT_TRAIN: dict[str, str] = {
    "DeepSeek-V4": "Megatron-LM 0.19.2 has no attention of the variant dsv4_hybrid",
}
_GATED, _SPARSE = "gated_delta_net", "dsa"  # variants of attention


class Change(NamedTuple):
    """A flag that is changed.

    value: which it has in recipes. instead: None for no flag. why: for the page. beside: variants of attention with
    which it is changed; empty for always.
    """

    flag: str
    value: Any
    instead: Any
    why: str
    beside: tuple[str, ...] = ()


CHANGED = (
    Change("moe_router_force_load_balancing", True, None, "it draws routes at random, other ones on each rank"),
    Change("moe_token_dispatcher_type", "flex", "alltoall", "its packages are for GPUs; tests/experts runs stand-ins"),
    Change("optimizer", "dist_muon", "adam", "it wants bf16; tests/layers/test_optimizers.py runs it"),
    Change("position_embedding_type", "mrope", "rope", "of text alone both are the same"),
    Change("sft", True, None, "data are made up"),
    Change(
        "overlap_param_gather",
        True,
        None,
        "Megatron-LM 0.19.2 reads weights of the convolution in Gated DeltaNet while they are gathered",
        (_GATED,),
    ),
    Change(
        _TAIL, 1, None, "pretrain_gpt.py of Megatron-LM 0.19.2 cannot build it beside this attention", (_GATED, _SPARSE)
    ),
)
# Flags that say nothing of a shrunk run on a CPU: data, checkpoints, optimizer states in bf16, and GPUs.
_WITHOUT = (
    "async_strategy split load persistent_save_interval use_persistent_ckpt_worker dist_ckpt_strictness "
    "dataloader_type no_mmap_bin_files num_workers manual_gc manual_gc_interval distributed_timeout_minutes "
    "ckpt_fully_parallel_save use_precision_aware_optimizer main_grads_dtype exp_avg_dtype exp_avg_sq_dtype "
    "fp8_recipe cross_entropy_loss_fusion cross_entropy_fusion_impl moe_flex_dispatcher_backend "
    "moe_hybridep_num_sms moe_flex_dispatcher_num_sms optimizer_offload_fraction muon_momentum muon_nesterov "
    "use_fused_weighted_squared_relu no_barrier_with_level_1_timing disable_strict_fsdp_dtensor_load "
    "no_overlap_p2p_communication data_parallel_sharding_strategy dsa_kernel_backend"
).split()


@dataclass(frozen=True)
class Chosen:
    """The recipe that stands for a family.

    flags: as in a recipe file. balancers: that accept it and have something to balance.
    """

    name: str
    ranks: int
    flags: Mapping[str, Any]
    balancers: tuple[str, ...]


def changes(flags: Mapping[str, Any]) -> list[Change]:
    """What is changed in the flags of a recipe."""
    attention = flags.get("experimental_attention_variant")
    return [
        each for each in CHANGED if flags.get(each.flag) == each.value and attention in (each.beside or (attention,))
    ]


def small_of(chosen: Chosen) -> Small:
    """The recipe shrunk."""
    changed = {each.flag: each.instead for each in changes(chosen.flags)}
    flags = {name: value for name, value in {**chosen.flags, **changed}.items() if name not in _WITHOUT}
    flags |= {"eval_interval": 1000, "max_position_embeddings": flags["seq_length"]}
    if "multi_latent_attention" in flags:  # by default
        flags = {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128} | flags
    if layout := flags.get("pipeline_model_parallel_layout"):  # which tells the virtual stages
        flags.pop("num_virtual_stages_per_pipeline_rank", None)
        flags["pipeline_model_parallel_layout"] = layout if flags.get(_TAIL) else layout.replace("m", "")
    if "linear_attention_freq" in flags:  # of each layer, which repeats
        flags["linear_attention_freq"] = json.loads(flags["linear_attention_freq"]).index(0) + 1
    if "window_size" in flags:
        flags["window_size"] = "8,0"
    if "overlap_grad_reduce" in flags:
        flags["ddp_bucket_size"] = 2000  # several buckets
    return shrink({name: value for name, value in flags.items() if value is not None}, chosen.ranks)
