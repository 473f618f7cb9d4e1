"""Does the installed Megatron-LM have the names and parameters that we use? They decide, not the version number.

Its source is parsed, since an import must come after the choice of a device. The targets of patches are checked again,
with the whole signature, when patches are installed (`megatron.balanced.trainer.patches`).
"""

import ast
from functools import cache
from pathlib import Path

from balancing.doctor.installed import find_megatron

__all__ = ["MEGATRON_VERSIONS", "PROBES", "check_megatron"]

MEGATRON_VERSIONS = ("0.19.0", "0.19.2")  # tested

# (file, function, class or method, some of its parameters; of a class its fields)
PROBES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("core/distributed/distributed_data_parallel.py", "DistributedDataParallel.__init__", ("full_param_layout",)),
    ("core/model_parallel_config.py", "resolve_tensor_parallel_weight_shards", ()),
    ("core/models/gpt/gpt_layer_specs.py", "get_gpt_decoder_block_spec", ("use_transformer_engine", "vp_stage")),
    (
        "core/optimizer/__init__.py",
        "get_megatron_optimizer",
        ("config", "model_chunks", "config_overrides", "use_gloo_process_groups"),
    ),
    ("core/optimizer/layer_wise_optimizer.py", "is_managed_by_layer_wise_optimizer", ()),
    ("core/optimizer/param_layout.py", "FullParamLayout", ()),
    ("core/packed_seq_params.py", "PackedSeqParams", ("cu_seqlens_q", "cu_seqlens_q_padded", "local_cp_size")),
    ("core/pipeline_parallel/schedules.py", "forward_backward_no_pipelining", ("num_microbatches", "forward_only")),
    ("core/pipeline_parallel/schedules.py", "forward_backward_pipelining_with_interleaving", ("num_microbatches",)),
    ("core/pipeline_parallel/schedules.py", "forward_backward_pipelining_without_interleaving", ("num_microbatches",)),
    ("core/transformer/moe/experts.py", "TEGroupedMLP.forward", ("permuted_local_hidden_states", "tokens_per_expert")),
    ("core/transformer/moe/moe_layer.py", "MoELayer.preprocess", ("hidden_states", "probs", "routing_map")),
    ("core/transformer/transformer_block.py", "_get_block_submodules", ("config", "spec", "vp_stage", "pp_rank")),
    ("core/transformer/transformer_config.py", "TransformerConfig", ("pipeline_model_parallel_layout",)),
    ("training/argument_utils.py", "pretrain_cfg_container_from_args", ("args", "model_cfg")),
    ("training/models/gpt.py", "default_layer_spec", ("config", "vp_stage")),
    ("training/models/hybrid.py", "HybridModelConfig", ("hybrid_layer_pattern",)),
    ("training/training.py", "train_step", ("forward_step_func", "forward_backward_func", "iteration")),
)


def check_megatron() -> list[str]:
    """Return notes for the user. Raise ValueError, which names what is missing, unless the Megatron-LM that Python
    would import has all names and parameters that we use."""
    installed = find_megatron()
    wanted = f"pip install megatron-core=={MEGATRON_VERSIONS[-1]}"
    if installed["version"] is None:
        raise ValueError(f"Megatron-LM is not installed; {wanted}")
    if not installed["training"]:
        raise ValueError(f"megatron-core {installed['version']} is installed without megatron.training; {wanted}")
    if installed["version"] in MEGATRON_VERSIONS:
        return []
    folder = Path(installed["core"]).parent
    for file, name, parameters in PROBES:
        has = _has(folder / file, name)
        missing = sorted(set(parameters) - (has or set()))
        if has is None or missing:
            what = f"no {name}" if has is None else f"no {missing[0]!r} in {name}"
            raise ValueError(f"megatron-core {installed['version']} (in {folder}) has {what} in {file}; {wanted}")
    return [f"megatron-core {installed['version']} is accepted, not tested; {' and '.join(MEGATRON_VERSIONS)} are"]


def _has(file: Path, name: str) -> set[str] | None:
    """Parameters of a function or fields of a class; None if it does not exist."""
    nodes: list[ast.stmt] = _statements(file)
    node: ast.stmt | None = None
    for part in name.split("."):
        named = (ast.FunctionDef, ast.ClassDef)
        node = next((each for each in nodes if isinstance(each, named) and each.name == part), None)
        if node is None:
            return None
        nodes = node.body
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    return {each.target.id for each in nodes if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


@cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
