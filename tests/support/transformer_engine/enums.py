"""The enumerations and empty classes of `transformer_engine_torch`, in the order of its headers."""

import enum

import torch

from tests.support.transformer_engine.cpp_module import MODULE

__all__ = ["TORCH_TYPE", "DType"]

DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
TORCH_TYPE = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}

_ENUMERATIONS = {
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": """
        NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK NVTE_CAUSAL_BOTTOM_RIGHT_MASK
        NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK""",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": """
        NVTE_BSHD NVTE_SBHD NVTE_THD NVTE_SBHD_2BSHD NVTE_BSHD_2SBHD NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD
        NVTE_QKV_Format_NOT_SET""",
    "NVTE_QKV_Layout": """
        NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD
        NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD
        NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD
        NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD
        NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD
        NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD
        NVTE_BHSD_BHSD_BHSD NVTE_QKV_Layout_NOT_SET""",
    "NVTE_Fused_Attn_Backend": "NVTE_F16_arbitrary_seqlen NVTE_FP8 NVTE_No_Backend",
    "NVTEScalingMode": """
        NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D NVTE_BLOCK_SCALING_2D
        NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING""",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT INVALID",
    "FP8FwdTensors": """
        GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT
        GEMM3_OUTPUT""",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": """
        BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P
        ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG""",
}
_CLASSES = (
    "FP8TensorMeta CommOverlap CommOverlapP2P CommOverlapHelper CommOverlapCore CommOverlapBase CommOverlapP2PBase"
)

MODULE.DType = DType
for _name, _members in _ENUMERATIONS.items():
    setattr(MODULE, _name, enum.IntEnum(_name, _members.split(), start=0))
for _name in _CLASSES.split():
    setattr(MODULE, _name, type(_name, (), {}))
MODULE.FP8TensorMeta.__init__ = lambda self: None
