"""What docs/internals/adding.md says of additions, tried: each is used with no other change."""

import argparse
import dataclasses

import numpy as np
import pytest
import torch

from balancing.cluster import Cluster
from balancing.experts import plan_replicas
from balancing.experts.config import ExpertConfig
from balancing.experts.plan import PLANNERS as EXPERT_PLANNERS
from balancing.kernels.base import _Products
from balancing.kernels.choice import KERNELS, KernelError, choose_among
from balancing.kernels.trial import AttentionHeads
from balancing.layers import plan_stages
from balancing.layers.config import LayerConfig
from balancing.layers.plan import PLANNERS as LAYER_PLANNERS
from balancing.sequences import AttentionShape, Shard, plan_sequences
from balancing.sequences.config import SequenceConfig
from balancing.sequences.plan import PLANNERS as SEQUENCE_PLANNERS
from balancing.settings import SettingError, setting
from megatron.balanced.trainer.config import SECTIONS, add_flags, config_from_flags

MACHINE = Cluster.preset("h100-8x400g").relabel(1, 2)


def plan_hottest(loads, problem):
    """A replica of each layer's hottest expert on the rank that is not its home."""
    placements = []
    for load in loads:
        slots, hottest = problem.empty, load.sum(0).argmax()
        slots[1 - problem.home[hottest], 0] = hottest
        placements.append(problem.placement(slots))
    return placements


def plan_whole(problem):
    ranks = problem.cluster.world_size
    return problem.plan([Shard(i, 0, length, i % ranks) for i, length in enumerate(problem.lengths)], "gather")


@pytest.mark.parametrize(
    ("planners", "config", "planner", "plan", "expected"),
    [
        (EXPERT_PLANNERS, ExpertConfig, plan_hottest,
         lambda name: plan_replicas([[1, 9], [1, 9]], MACHINE, slots=1, method=name).slot_expert.tolist(), [[1], [-1]]),
        (LAYER_PLANNERS, LayerConfig, lambda problem: [0, problem.layers - 1, problem.layers],
         lambda name: plan_stages(np.ones(5), 2, method=name).bounds, (0, 4, 5)),
        (SEQUENCE_PLANNERS, SequenceConfig, plan_whole,
         lambda name: plan_sequences([7, 5], MACHINE, shape=AttentionShape(64, 4, 2, 2, 64), method=name).attention,
         (Shard(0, 0, 7, 0), Shard(1, 0, 5, 1))),
    ],
    ids=["experts", "layers", "sequences"],
)  # fmt: skip
def test_a_planner_is_an_entry_of_a_dict(monkeypatch, planners, config, planner, plan, expected):
    with pytest.raises(ValueError, match=r"unknown method 'mine'; known: \w+, "):
        plan("mine")
    with pytest.raises(SettingError, match=r"planner mine is none of \w+, "):
        config(planner="mine")
    monkeypatch.setitem(planners, "mine", planner)
    assert plan("mine") == expected
    assert config(planner="mine").planner == "mine"


class Capped(_Products):
    def forward(self, q, k, v, pieces, scale):
        return super().forward(q.tanh(), k, v, pieces, scale)


def test_a_kernel_is_a_name_and_a_class_and_must_compute_the_same(monkeypatch):
    monkeypatch.setitem(KERNELS, "mine", "my kernel")
    given = torch.device("cpu"), AttentionHeads(torch.float64, 4, 2, 6, 6), "mine"
    assert choose_among({"mine": lambda: ("mine", _Products())}, *given).name == "mine"
    with pytest.raises(KernelError, match="mine: its outputs of causal pieces"):
        choose_among({"mine": lambda: ("mine", Capped())}, *given)


def test_an_option_is_a_field_of_a_config(monkeypatch):
    more = setting(3, "Another number.", flag="--another-number", metavar="N", least=1)
    monkeypatch.setitem(SECTIONS, "experts", dataclasses.make_dataclass(
        "More", [("another", int, more)], bases=(ExpertConfig,), frozen=True))  # fmt: skip
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config, _ = config_from_flags(parser.parse_args("--balance-experts --another-number 5".split()), "cpu")
    assert config.experts.another == 5
    with pytest.raises(ValueError, match="--another-number 0 must be at least 1"):
        config_from_flags(parser.parse_args("--balance-experts --another-number 0".split()), "cpu")
