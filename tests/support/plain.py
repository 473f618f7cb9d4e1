"""Megatron-LM trained by an entry of its own on the CPU device: no flag, patch, data or model code of our package.

What our runs are compared with when they must be upstream's, bit for bit, and what reads and writes checkpoints
without our package. Tensor parallelism and packed documents are left out.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support.training import RankRun, Run, join, watch

# What Megatron-LM needs to be told on a machine without Transformer Engine, Apex and CUDA.
MACHINE = (
    "--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --distributed-backend gloo"
).split()


def _datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
    )

    def at_an_end() -> bool:
        first = mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
        return first or mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, sizes, at_an_end, config).build()


_datasets.is_distributed = True  # type: ignore[attr-defined]


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = (output.view(-1).float() * mask.view(-1)).sum()
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def _forward(data_iterator: Iterator | None, model: torch.nn.Module) -> Any:
    batch = {} if data_iterator is None else next(data_iterator)
    output = model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
    )
    return output, lambda output: _loss(batch["loss_mask"], output)


def plain_rank(argv: list[str], tools: str, keep_parameters: bool) -> RankRun:
    """The body of one rank. `tools` is a folder with a `make` that does nothing: the wheel has no Makefile."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron.balanced.trainer import patches

    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    sys.argv[1:] = argv
    args = parse_and_validate_args()
    finish = watch(keep_parameters)
    model_config = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    container = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(container, _datasets, ModelType.encoder_or_decoder, _forward)
    assert not patches._installed
    return finish()


def train_plainly(
    pool: Any,
    world_size: int,
    argv: list[str],
    folder: Path,
    *,
    parameters: bool = True,
    body: Callable[..., RankRun] = plain_rank,
) -> Run:
    """Train without our package. `argv` may have `--device cpu`, which is dropped; `folder` is for scratch files.
    body: of one rank."""
    make = folder / "make"
    make.write_text("#!/bin/sh\n")
    make.chmod(0o755)
    own = list(argv)
    if "--device" in own:
        at = own.index("--device")
        del own[at : at + 2]
    return join(pool.run(world_size, body, [*MACHINE, *own], str(folder), parameters))
