"""Training, from checked flags to the last checkpoint: everything ours is put in place, then Megatron takes over."""

import argparse

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.utils import print_rank_0

from megatron.balanced import patches
from megatron.balanced.arguments import BalanceConfig
from megatron.balanced.data import forward_step, train_valid_test_datasets
from megatron.balanced.model import model_config

__all__ = ["train"]


def train(args: argparse.Namespace, config: BalanceConfig) -> None:
    """Train as the flags say. `parse_arguments` made both arguments."""
    if config.balance_dry_run:
        print_rank_0("\n".join(patches.rows(args, config)))
        return
    for line in patches.install(args, config):
        print_rank_0(f"> {line}")
    model = model_config(args)
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        train_valid_test_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
