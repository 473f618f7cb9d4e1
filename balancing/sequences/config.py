"""Settings of balanced sequences."""

from dataclasses import dataclass

from balancing.sequences.plan import PLANNERS
from balancing.settings import check_settings, setting

__all__ = ["SequenceConfig"]


@dataclass(frozen=True)
class SequenceConfig:
    """Raises SettingError, a ValueError, for a value out of range."""

    enabled: bool = setting(
        False,
        "Spread each batch of packed documents over ranks so that all have the same tokens and the same attention. "
        "Needs context parallelism, or data-parallel ranks with --sft or --dataloader-inter-document-masking. Losses "
        "do not change.",
        flag="--balance-sequences",
    )
    domain: str = setting(
        "auto",
        "The ranks that share micro-batches. context: the context-parallel ranks of each data-parallel rank. data: all "
        "data-parallel ranks with their context-parallel ranks. auto: data with --context-parallel-size 1, else the "
        "quicker one by the cost model, for documents of the training set.",
        flag="--sequence-domain",
        choices=("auto", "context", "data"),
    )
    micro_batches: bool = setting(
        False,
        "Distribute the documents of a step over its micro-batches, so that pipeline stages wait less. A micro-batch "
        "gets at most 1.25 times its tokens, or as many as token_capacity allows. With router losses or fp8, whole "
        "micro-batches are reordered instead. Losses do not change.",
        flag="--sequence-micro-batches",
    )
    planner: str = setting(
        "chunks",
        "chunks: equal tokens and equal attention in one layout. zones: as in Zeppelin. ring, gather: as in "
        "Transformer Engine and Llama 3.",
        choices=PLANNERS,
    )
    chunk: int = setting(0, "Tokens of a chunk; 0 leaves it to the planner.", least=0)
    token_capacity: int = setting(0, "Most tokens that a rank may hold in attention; 0 is no limit.", least=0)
    routing: int = setting(
        0,
        "Number of ranks of a node that share a transfer to another node, so that each of the node's NICs carries a "
        "part. 0: the cost model chooses. 1: no sharing.",
        least=0,
    )

    kernel: str = setting(
        "auto",
        "The kernel of attention on GPUs. auto: the fastest by a measurement at the start, or that of the checkpoint. "
        "flash: of FlashAttention's. fused: cuDNN's. Or one of cudnn, fa2, fa3, fa4, flash-attn. What it does not take "
        "goes to others.",
        choices=("auto", "flash", "fused", "cudnn", "fa3", "fa4", "flash-attn", "fa2"),
    )
    attention_cuda_graphs: bool = setting(
        False,
        "Capture a layer's attention as CUDA graphs, which the other layers of a micro-batch replay. It saves time of "
        "the host from three layers a model chunk, and takes memory for two layers' attention. Losses do not change. "
        "Not run on a GPU.",
    )

    def __post_init__(self) -> None:
        check_settings(self)
