"""NVIDIA's functional training configurations, small enough for a CPU and with the structure that they have.

`shrink` keeps which parts a model has and which flags are on, and changes how many there are of everything: layers,
widths, experts, tokens, ranks. `for_cpu` then leaves out what only a GPU can run, and chooses the precision: float64,
or float32 where the model needs Transformer Engine, whose stand-in has no other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["GPU_ONLY", "LEFT_OUT", "NEEDS_TRANSFORMER_ENGINE", "Small", "for_cpu", "shrink"]

_SCHEDULE = "three iterations with one learning rate"
_DATA = "the data are made up"
# Left out of every configuration.
LEFT_OUT: dict[str, str] = {
    "lr": _SCHEDULE,
    "min_lr": _SCHEDULE,
    "lr_decay_style": _SCHEDULE,
    "lr_decay_iters": _SCHEDULE,
    "lr_decay_samples": _SCHEDULE,
    "lr_warmup_fraction": _SCHEDULE,
    "lr_warmup_init": _SCHEDULE,
    "lr_warmup_samples": _SCHEDULE,
    "rampup_batch_size": _SCHEDULE,
    "train_samples": _SCHEDULE,
    "fim_data": _DATA,
    "fim_rate": _DATA,
    "fim_spm_rate": _DATA,
    "no_mmap_bin_files": _DATA,
    "no_async_tensor_model_parallel_allreduce": "Megatron-LM 0.19.2 does not know it",
    "activation_func_fp8_input_store": "Megatron-LM 0.19.2 does not know it",
}

_KERNELS = "its kernels are for GPUs"
_GRAPHS = "a CPU has no CUDA graphs"
_PRECISION = "runs are compared in float64 or float32"
_CHECKPOINTS = "no checkpoint is written"
# Left out of runs.
GPU_ONLY: dict[str, str] = {
    "attention_backend": _KERNELS,
    "use_flash_attn": _KERNELS,
    "cp_comm_type": _KERNELS,
    "hierarchical_context_parallel_sizes": _KERNELS,
    "moe_router_fusion": _KERNELS,
    "moe_permute_fusion": _KERNELS,
    "tp_comm_overlap": _KERNELS,
    "cuda_graph_impl": _GRAPHS,
    "cuda_graph_scope": _GRAPHS,
    "cuda_graph_modules": _GRAPHS,
    "cuda_graph_warmup_steps": _GRAPHS,
    "te_rng_tracker": _GRAPHS,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "attention_softmax_in_fp32": _PRECISION,
    "clip_grad": "it divides by a norm in float32",
    "init_method_std": "weights as small teach a toy model nothing",
    "deterministic_mode": "gloo and a CPU repeat themselves",
    "ckpt_format": _CHECKPOINTS,
    "async_save": _CHECKPOINTS,
    "ckpt_assume_constant_structure": _CHECKPOINTS,
    "disable_gloo_process_groups": "gloo is all there is",
    "mock_data": "each run is told its data",
    "tokenizer_type": "each run is told its data",
    "vocab_size": "each run is told its data",
}
# Flags of a model that trains on Transformer Engine's layers only.
NEEDS_TRANSFORMER_ENGINE = (
    "fp8_format",
    "multi_latent_attention",
    "experimental_attention_variant",
    "apply_layernorm_1p",
)

_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 64,
    "mup_base_hidden_size": 16,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "fp8_amax_history_len": 4,
    "micro_batch_size": 1,
    "eval_iters": 0,
    "check_weight_hash_across_dp_replicas_interval": 1,
    "microbatch_group_size_per_virtual_pipeline_stage": 3,
}
_RANKS = 4
_TENSOR, _PIPELINE, _CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_EXPERT, _EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
# Stages differ from each other: a pipeline of two has none between the first and the last.
_UNEVEN = ("decoder_first_pipeline_num_layers", "account_for_embedding_in_pipeline_split")
# Common to all runs. One learning rate for all, large enough to tell two runs apart.
_RUN = {"lr": 1e-3, "clip_grad": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.1}


@dataclass(frozen=True)
class Small:
    """A configuration that is shrunk.

    ranks: of the job.
    flags: name of a flag, with underscores -> its value, as in a recipe.
    """

    ranks: int
    flags: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Equal for configurations that are equal."""
        return f"{self.ranks} {sorted(self.flags.items())}"

    @property
    def needs_transformer_engine(self) -> bool:
        recomputed = self.flags.get("recompute_modules", ())
        return "moe_act" in recomputed or any(name in self.flags for name in NEEDS_TRANSFORMER_ENGINE)


def shrink(flags: Mapping[str, Any], ranks: int) -> Small:
    """A toy configuration with the structure of `flags`, which are for a job of `ranks` ranks.

    Each parallel size becomes at most 2, or 4 for a pipeline of uneven stages. While the job has more than 4 ranks,
    data parallelism goes first, then tensor parallelism. 8 ranks are left where experts are tensor parallel, and where
    data-parallel ranks are not next to each other.
    """
    small = {name: value for name, value in flags.items() if name not in LEFT_OUT}
    small |= {name: min(size, small[name]) for name, size in _SIZES.items() if name in small}
    data, ranks = _shrink_layout(small, ranks)
    _shrink_layers(small)
    stages = small.get(_PIPELINE, 1)
    micro_batches = small.get("microbatch_group_size_per_virtual_pipeline_stage") or max(2, 4 // data, stages)
    return Small(ranks, small | {"train_iters": 3, "global_batch_size": micro_batches * data})


def _shrink_layout(small: dict[str, Any], ranks: int) -> tuple[int, int]:
    """Clip the parallel sizes in place. Returns the data-parallel ranks, and the ranks."""
    sizes = {name: small.get(name, 1) for name in (_TENSOR, _PIPELINE, _CONTEXT)}
    data = min(2, max(1, ranks // (sizes[_TENSOR] * sizes[_PIPELINE] * sizes[_CONTEXT])))
    uneven = any(name in small for name in _UNEVEN)
    sizes = {name: min(size, 4 if name == _PIPELINE and uneven else 2) for name, size in sizes.items()}
    expert = min(2, small.get(_EXPERT, 1))
    beside = small.get(_EXPERT_TENSOR)  # ranks that share an expert; by default as many as share everything else
    keeps = "num_experts" in small and min(2, beside or 1) > 1
    other_order = small.get("use_tp_pp_dp_mapping", False)

    def total() -> int:
        """The fewest ranks that the sizes allow."""
        stage = sizes[_TENSOR] * sizes[_CONTEXT] * data
        shared = sizes[_TENSOR] if beside is None else min(2, beside)
        return sizes[_PIPELINE] * max(stage, expert * shared if "num_experts" in small else 1)

    if small.get("num_distributed_optimizer_instances", 1) > 1:  # each has a part of the replicas, of experts as well
        data, sizes[_TENSOR] = (_RANKS, 1) if "num_experts" in small else (2, sizes[_TENSOR])
    elif total() > _RANKS and not other_order:
        data = 1
    if total() > _RANKS and not keeps:
        sizes[_TENSOR] = 1
    if beside is not None:
        small[_EXPERT_TENSOR] = min(2, beside)
        if other_order:  # wants as many data-parallel ranks for experts as for the rest of the model
            if "num_experts" in small:
                sizes[_TENSOR] = expert * min(2, beside) // sizes[_CONTEXT]
                data = 1
            else:
                small[_EXPERT_TENSOR] = sizes[_TENSOR] * sizes[_CONTEXT]
    if _EXPERT in small:
        small[_EXPERT] = expert
    small.update({name: size for name, size in sizes.items() if name in small})
    if "hierarchical_context_parallel_sizes" in small:
        small["hierarchical_context_parallel_sizes"] = [1, sizes[_CONTEXT]]
    ranks = total()
    return ranks // (sizes[_TENSOR] * sizes[_PIPELINE] * sizes[_CONTEXT]), ranks


def _shrink_layers(small: dict[str, Any]) -> None:
    """Two layers a chunk, or what the layout of stages leaves; two chunks a stage where there are several."""
    stages = small.get(_PIPELINE, 1)
    if pattern := small.get("hybrid_layer_pattern"):  # of one stage
        last = max(map(pattern.index, {*pattern}))
        small["hybrid_layer_pattern"] = pattern[: last + 2]
        small["num_layers"] = len(small["hybrid_layer_pattern"])
    elif layout := small.get("pipeline_model_parallel_layout"):
        chunks = _chunks_of(layout)
        kept = [chunks[0], chunks[1], chunks[-2], chunks[-1]] if len(chunks) > stages else [chunks[0], chunks[-1]]
        small["pipeline_model_parallel_layout"] = "|".join(re.sub("ttt+", "tt", chunk) for chunk in kept)
        small["num_layers"] = small["pipeline_model_parallel_layout"].count("t")
    elif "num_layers_per_virtual_pipeline_stage" in small:
        small["num_layers_per_virtual_pipeline_stage"] = 2
        small["num_layers"] = stages * 2 * 2
    elif "decoder_first_pipeline_num_layers" in small:
        small["decoder_first_pipeline_num_layers"] = small["decoder_last_pipeline_num_layers"] = 1
        small["num_layers"] = 2 + (stages - 2) * 2
    elif (
        chunks := "num_virtual_stages_per_pipeline_rank"
    ) in small or "account_for_embedding_in_pipeline_split" in small:
        small |= {chunks: 2} if chunks in small else {}
        small["num_layers"] = stages * small.get(chunks, 1) * 2
        if "account_for_embedding_in_pipeline_split" in small:  # the embedding and the loss count as a layer each
            small["num_layers"] -= 2
    else:
        small["num_layers"] = max(4 if stages > 1 else 2, small.get("linear_attention_freq", 0))
    if "moe_layer_freq" in small:  # dense layers, then those with experts
        small["moe_layer_freq"] = f"([0]*1+[1]*{small['num_layers'] - 1})"


def _chunks_of(layout: str) -> list[str]:
    """The chunks of a --pipeline-model-parallel-layout, written out."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    return re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), text).split("|")


def for_cpu(small: Small, *, spreads: bool) -> Small:
    """What ranks without GPUs run of a configuration.

    spreads: sequences are spread over the context-parallel ranks. Without that there is no attention over them here,
    and these ranks are data-parallel.
    """
    flags = {name: value for name, value in small.flags.items() if name not in GPU_ONLY} | _RUN
    if small.needs_transformer_engine:
        flags |= {"transformer_impl": "transformer_engine", "attention_backend": "unfused"}
    else:
        flags |= {"transformer_impl": "local", "fp64": True}
        flags.pop("moe_grouped_gemm", None)  # Transformer Engine's, and without it Megatron-LM ignores the flag
    if "fine_grained_activation_offloading" in flags:
        flags["min_offloaded_tensor_size"] = 1
    if flags.get("optimizer") == "muon":
        flags |= {"fp64": False, "muon_fp32_matmul_prec": "high"}  # it makes matrices orthogonal in float32 at best
    if flags.get(_CONTEXT, 1) > 1:
        # The bias of keys cannot change a softmax: its gradient is rounding noise, of which Adam makes whole steps.
        flags |= {"disable_bias_linear": True, "calculate_per_token_loss": True}
        if not spreads:
            flags[_CONTEXT] = 1
            for name in ("use_tp_pp_dp_mapping", _EXPERT_TENSOR):  # which fit the context-parallel ranks
                flags.pop(name, None)
    return replace(small, flags={"device": "cpu", "log_interval": 1, "num_workers": 0} | flags)
