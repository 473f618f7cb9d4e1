"""Wrong use of balancers in a loop of one's own is one line that says the way out."""

import pytest


def _refusals() -> list[str]:
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.loop import Balancers, ExpertBalancer
    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.shared.job import Job

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    job, linear = Job(8, 1, 5), torch.nn.Linear(2, 2)
    linear.config = config
    dense = DistributedDataParallel(config, DistributedDataParallelConfig(), linear)
    told = []
    for wrong in (
        lambda: ExpertBalancer([linear], job=job),
        lambda: ExpertBalancer([dense], job=job),
        lambda: Balancers(StepCallback(), StepCallback()),
    ):
        with pytest.raises(ValueError) as refused:
            wrong()
        told.append(str(refused.value))
    return told


def test_wrong_use_is_one_line_that_says_the_way_out(pool):
    ((unwrapped, dense, twice),) = pool.run(1, _refusals)
    assert "Linear cannot be balanced; wrap it in megatron.core's DistributedDataParallel" in unwrapped
    assert "has no MoE layer" in dense and "is given twice" in twice
    assert not any("\n" in line for line in (unwrapped, dense, twice))
