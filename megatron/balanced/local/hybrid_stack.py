"""The layers of a hybrid model without Transformer Engine (`--hybrid-layer-pattern`, `--transformer-impl local`).

Megatron-LM 0.19.2 has a spec of these layers only with modules of Transformer Engine. This spec uses Megatron-LM's own
modules, as its local GPT layers do. Checkpoints have the names of Transformer Engine's modules.
"""

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

__all__ = ["LocalHybridStack", "LocalStackSubmodules", "local_stack_spec"]


@dataclass
class LocalStackSubmodules(HybridStackSubmodules):
    """Megatron-LM's submodules, and the class of the final norm. Megatron-LM always uses Transformer Engine's norm."""

    final_norm: Any = WrappedTorchNorm


class LocalHybridStack(HybridStack):
    """Megatron-LM's stack, with the final norm of its submodules."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LocalStackSubmodules,
        *,
        post_layer_norm: bool = True,
        post_process: bool = True,
        **rest: Any,
    ) -> None:
        super().__init__(config, submodules, post_layer_norm=False, post_process=post_process, **rest)
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = submodules.final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def local_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """The spec of the layers of a model with this config."""
    parts = get_gpt_layer_local_submodules(
        multi_latent_attention=config.multi_latent_attention, normalization=config.normalization
    )
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    if not config.multi_latent_attention:  # whose norm is a module of its own in Transformer Engine's layers as well
        attention.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm,
        mlp=parts.mlp,
        mlp_bda=parts.mlp_bda,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=False),
        mlp_bda=parts.mlp_bda,
    )
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=parts.input_layernorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=parts.self_attn_bda,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    layer = ModuleSpec(module=TransformerLayer, submodules=attention)
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=LocalStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=layer,
            mla_layer=layer,
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
        ),
    )
