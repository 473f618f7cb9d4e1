"""Wrong use of balancers in a loop of one's own is one line that says the way out."""

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

WAYS_OUT = re.compile(
    r"; (use|drop|wrap|call|close|make|set|switch|leave|pad|pass|add)|use at most|close\(\) its Balancers"
)


@contextlib.contextmanager
def _with(owner: Any, **fields: Any) -> Iterator[None]:
    """A context in which `owner` has these attributes."""
    before = {name: vars(owner).get(name) for name in fields}
    vars(owner).update(fields)
    try:
        yield
    finally:
        for name, value in before.items():
            vars(owner).pop(name) if value is None else vars(owner).update({name: value})


def _refusals() -> dict[str, str]:
    """What is wrong -> the message."""
    import torch

    from tests.support.small_moe import SAMPLES, SEQUENCE, build

    model = build(torch.float32)
    import torch.distributed as dist
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from balancing.experts.config import ExpertConfig
    from balancing.sequences.config import SequenceConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer, SequenceBalancer
    from megatron.balanced.shared.job import Job
    from megatron.balanced.shared.model_checks import check_configs

    told, config, job = {}, model.config, Job(SEQUENCE, SAMPLES, 5)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    layer = model.module.decoder.layers[0]

    def experts(**settings: Any) -> Any:
        return ExpertBalancer([model], ExpertConfig(enabled=True, **settings), job=job)

    def layers(optimizer: Any = optimizer) -> Any:
        return LayerBalancer([model], optimizer, None, layer_spec=lambda vp_stage: None, job=job)

    def refused(name: str, call: Callable[[], Any], owner: Any = None, **fields: Any) -> None:
        with _with(config if owner is None else owner, **fields), pytest.raises(ValueError) as error:
            call()
        told[name] = str(error.value)

    def sharded(of: type) -> Any:
        wrapper: Any = of.__new__(of)
        torch.nn.Module.__init__(wrapper)
        return wrapper

    refused("unwrapped", lambda: ExpertBalancer([model.module], job=job))
    refused("fsdp", lambda: ExpertBalancer([sharded(FullyShardedDataParallel)], job=job))
    refused("fsdp2", lambda: SequenceBalancer([sharded(TorchFullyShardedDataParallel)], job=job))
    refused("fsdp of the config", layers, model.ddp_config, use_megatron_fsdp=True)
    refused("moonep", experts, moe_flex_dispatcher_backend="moonep")
    refused("delayed scaling", experts, fp8="hybrid", fp8_recipe="delayed")
    refused("graphs", experts, cuda_graph_impl="full_iteration")
    refused("captured", lambda: SequenceBalancer([model], job=job), layer, cuda_graphs=[object()])
    refused("group", experts, model.module.pg_collection, ep=alone)
    refused("slots", lambda: experts(replica_slots=5))
    refused("no experts", experts, num_moe_experts=None)
    refused("linears", experts, layer.mlp.experts.local_experts[0], _modules={
        "linear_fc1": torch.nn.Linear(2, 2), "linear_fc2": torch.nn.Linear(2, 2)})  # fmt: skip
    refused("offload", layers, optimizer.config, optimizer_cpu_offload=True)
    refused("main parameters", layers, optimizer.config, main_params_dtype=torch.float16)
    refused("torch's optimizer", lambda: layers(torch.optim.Adam(model.parameters())))
    refused("one stage", layers)
    by_rank = SimpleNamespace(save="here", ckpt_format="torch")
    refused("checkpoints by rank", lambda: check_configs("LayerBalancer", by_rank))
    stored = SimpleNamespace(fp8="hybrid", fp8_param=True, first_last_layers_bf16=True, fp8_recipe="mxfp8")
    refused("8 bits", lambda: check_configs("ExpertBalancer", stored, SimpleNamespace(fp8_param_gather=False)))
    refused("no length", lambda: ExpertBalancer([model]), model.module, max_sequence_length=None)
    refused("off", lambda: ExpertBalancer([model], ExpertConfig(), job=job))
    of_trainer = SequenceConfig(enabled=True, token_capacity=64)
    refused("no effect", lambda: SequenceBalancer([model], of_trainer, job=job))
    refused("dropout", lambda: SequenceBalancer([model], job=job), attention_dropout=0.1)
    first, attention = experts(), SequenceBalancer([model], job=job)
    refused("a second one", experts)
    refused("a second one of sequences", lambda: SequenceBalancer([model], job=job))
    refused("twice", lambda: Balancers(first, first))
    Balancers(first, attention).close()
    Balancers(experts(), SequenceBalancer([model], job=job)).close()  # may be attached again
    return told


EXPECTED = {
    "unwrapped": "GPTModel cannot be balanced; wrap it in megatron.core's DistributedDataParallel",
    "fsdp": "FullyShardedDataParallel cannot be balanced, since it shards",
    "fsdp2": "TorchFullyShardedDataParallel cannot be balanced, since it shards",
    "fsdp of the config": "LayerBalancer is incompatible with use_megatron_fsdp=True",
    "moonep": "moe_flex_dispatcher_backend=moonep: with it Megatron-LM balances experts itself; use deepep",
    "delayed scaling": "use tensorwise, blockwise or mxfp8",
    "graphs": "ExpertBalancer is incompatible with cuda_graph_impl=full_iteration",
    "captured": "has CUDA graphs already",
    "group": "process group ep has ranks",
    "slots": "8 experts over 2 expert-parallel ranks leave 4 on other ranks; use at most 4",
    "no experts": "the model has no experts; drop the ExpertBalancer",
    "linears": "a parameter of decoder.layers.0.mlp.experts trains and is in no gradient buffer",
    "offload": "optimizer_cpu_offload=True: it keeps optimizer state on the host; use use_distributed_optimizer",
    "main parameters": "main_params_dtype=fp16",
    "torch's optimizer": "optimizer of class Adam; use get_megatron_optimizer",
    "one stage": "layers cannot move, since there is only one pipeline stage; drop the LayerBalancer",
    "checkpoints by rank": "ckpt_format=torch: it would save layers by the rank that happens to have them; use torch",
    "8 bits": "ExpertBalancer is incompatible with first_last_layers_bf16=True: it stores experts of some layers in an",
    "no length": "the model does not tell its longest sequence; pass job=Job(seq_length)",
    "off": "ExpertBalancer got ExpertConfig(enabled=False), and balances where it is made; set enabled=True",
    "no effect": "token_capacity 64 of sequences does nothing where the loop places tokens; drop it",
    "dropout": "SequenceBalancer is incompatible with attention_dropout=0.1: it drops other attention scores",
    "a second one": "the model has a balancer of class ExpertBalancer already; close() its Balancers",
    "a second one of sequences": "a balancer of class SequenceBalancer already",
    "twice": "ExpertBalancer is given twice",
}


def test_wrong_use_is_one_line_that_says_the_way_out(pool):
    for told in pool.run(2, _refusals):
        assert told.keys() == EXPECTED.keys()
        for name, message in told.items():
            assert EXPECTED[name] in message and "\n" not in message, (name, message)
            assert WAYS_OUT.search(message) or "a model has one balancer of a kind" in message, message


def _misplaced() -> list[str]:
    """Names in rows for other loops that no config there has, and in rows for `pretrain_gpt.py` alone that one has."""
    import dataclasses

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.training.config.training_config import CheckpointConfig

    from megatron.balanced.shared.incompatible import INCOMPATIBLE, LOOPS, TRAINER
    from tests.support.limits import BALANCERS, LATER

    configs = HeterogeneousTransformerConfig, DistributedDataParallelConfig, OptimizerConfig, CheckpointConfig
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    rows = [row for row in INCOMPATIBLE if {*row.features} & {*BALANCERS}]
    elsewhere = {row.flag for row in rows if row.where == LOOPS}
    wrong = []
    for row in rows:
        names = {row.flag, *row.only_with} - {*LATER}
        if row.where != TRAINER:
            wrong += names - fields
        elif names <= fields and not names & elsewhere:
            wrong.append(row.flag)
    return wrong


def test_rows_for_other_loops_name_fields_of_configs(pool):
    assert pool.run(1, _misplaced) == [[]]


def _groups_that_do_not_fit() -> list[str]:
    import torch

    from tests.support.small_moe import build

    model = build(torch.float32)
    from megatron.core import parallel_state

    from megatron.balanced.loop import ExpertBalancer
    from megatron.balanced.shared.job import Job

    told = []
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            ExpertBalancer([model], job=Job(8, 1, 5))
        told.append(str(error.value))
        parallel_state.destroy_model_parallel()
    return told


def test_groups_that_do_not_fit_are_named(pool):
    ((alone, without),) = pool.run(1, _groups_that_do_not_fit)
    assert "the expert-parallel group is one rank, which has all experts; drop the ExpertBalancer" in alone
    assert "has no process groups, but balancers use them; call initialize_model_parallel" in without


def _closed() -> list[bool]:
    """Whether schedules are Megatron-LM's, after each of two balancers has been closed in the order of making."""
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    from megatron.core.pipeline_parallel import schedules

    from megatron.balanced.loop import Balancers

    plain = schedules.forward_backward_no_pipelining
    actor, critic = Balancers(), Balancers()
    actor.install()
    critic.install()
    of_both, seen = schedules.forward_backward_no_pipelining, []
    for each in (actor, critic):
        each.close()
        seen.append(schedules.forward_backward_no_pipelining is of_both)
    return [*seen, schedules.forward_backward_no_pipelining is plain]


def test_one_of_two_balanced_models_may_be_closed_first(pool):
    """The other one stays balanced."""
    assert pool.run(1, _closed) == [[True, False, True]]
