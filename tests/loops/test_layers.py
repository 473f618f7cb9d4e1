"""Layers that move in a loop of megatron.core alone: no number changes, whatever the pipeline, the optimizer, the
precision and the model are."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.sampled import sampled
from tests.support.weights import ADAM_EPS, assert_same_weights, named_weights

STEPS, VOCABULARY, SEQUENCE, SAMPLES = 6, 60, 16, 2
PIPELINE, EXPERTS = 2, 2  # sizes


class Case(NamedTuple):
    """A loop, and where layers go in it.

    layers: of the model; or the pattern of a hybrid model, where layers lie first.
    before, by_cost, by_hand: where they lie first, where the balancer moves them after three steps, since the first one
        costs as much as three others, and where the loop moves them later.
    chunks: of a stage.
    distributed: whether the optimizer is distributed, with both overlaps and several buckets.
    half: whether weights are bfloat16 beside main parameters in float32; without balanced experts then, whose partial
        sums of gradients are rounded.
    numbers: of micro-batches, in turn.
    steps: of the loop.
    fails: whether a schedule that fails precedes each step, and routers keep routing for a replay.
    """

    before: str
    by_cost: str
    by_hand: str
    layers: int | str = 6
    chunks: int = 1
    distributed: bool = False
    half: bool = False
    numbers: tuple[int, ...] = (4,)
    steps: int = STEPS
    fails: bool = False


CASES = {
    "": Case("Ettt|tttL", "Ett|t*4L", "Et*5|tL"),
    "two chunks": Case("Ett|tt|tt|ttL", "Et|ttt|tt|ttL", "Et|t|t|t*5L", 8, chunks=2),
    "distributed optimizer": Case("Ettt|tttL", "Ett|t*4L", "Et*5|tL", distributed=True),
    "bfloat16": Case("Ettt|tttL", "Ett|t*4L", "Et*5|tL", distributed=True, half=True),
    "two chunks, bfloat16": Case("Ett|tt|tt|ttL", "Et|ttt|tt|ttL", "Et|t|t|t*5L", 8, chunks=2, half=True),
    "numbers that change": Case("Ettt|tttL", "Ett|t*4L", "Et*5|tL", numbers=(4, 2, 3), fails=True),
    "hybrid": Case("M-*E|M-*E", "M-*|EM-*E", "M-*EM-*|E", "M-*E|M-*E", distributed=True),
}

# The step after which the gate looks at those that came after the move has half as many micro-batches.
SMALL_STEP = Case("Ettt|tttL", "Ett|t*4L", "", numbers=(*(4,) * 9, 2), steps=10)


class Fault(RuntimeError):
    """What a loop catches."""


class Ended(NamedTuple):
    """A rank after its run. losses: its own. layouts: that it was told. advised: the best layout."""

    losses: list[float]
    weights: dict[str, Any]
    layouts: list[str]
    events: list[dict]
    advised: str


def _model(case: Case, config: Any) -> tuple[list[Any], Any]:
    """The chunks of this rank, and the function that gives their layer spec."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.module import Float16Module

    from megatron.balanced.local.hybrid_stack import local_stack_spec
    from megatron.balanced.local.mamba import ScannedMambaMixer

    def layer_spec(vp_stage: int | None) -> Any:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)

    chunks = []
    for vp_stage in range(case.chunks) if case.chunks > 1 else [None]:
        where: Any = {"ignore_virtual": case.chunks == 1, "vp_stage": vp_stage}
        ends: Any = {
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "vp_stage": vp_stage,
        }
        if isinstance(case.layers, str):
            stack = local_stack_spec(config)
            stack.submodules.mamba_layer.submodules.mixer.module = ScannedMambaMixer
            model: Any = HybridModel(
                config, stack, VOCABULARY, SEQUENCE, case.layers, position_embedding_type="learned_absolute", **ends
            )
        else:
            model = GPTModel(config, layer_spec(vp_stage), VOCABULARY, SEQUENCE, **ends)
        model = Float16Module(config, model) if case.half else model.double()
        how = DistributedDataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=case.distributed, bucket_size=3000,
            overlap_param_gather=case.distributed, grad_reduce_in_fp32=case.half,
        )  # fmt: skip
        chunks.append(DistributedDataParallel(config, how, model, disable_bucketing=bool(vp_stage)))
    return chunks, layer_spec


def _train(name: str, balanced: bool, moves: bool = True) -> Ended:
    """Two stages of two ranks, which share experts, as the loop of `CASES[name]`."""
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import unwrap_model

    from balancing.experts.config import ExpertConfig
    from balancing.layers.config import LayerConfig
    from megatron.balanced.loop import Balancers, ExpertBalancer, LayerBalancer
    from megatron.balanced.shared.job import Job
    from tests.support.set_clock import SetClock, slow_layers

    case, clock = CASES.get(name, SMALL_STEP), SetClock().install()
    hybrid = isinstance(case.layers, str)
    slow_layers(clock, lambda number: (1.0, 2.0) if number else (3.0, 6.0))
    if hybrid:
        slow_layers(clock, lambda number: (1.0, 2.0) if number else (3.0, 6.0), MambaLayer)
    dtype = torch.bfloat16 if case.half else torch.float64
    torch.set_default_dtype(torch.float32 if case.half else torch.float64)
    dist.init_process_group("gloo")
    virtual = case.chunks if case.chunks > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=PIPELINE, expert_model_parallel_size=EXPERTS,
        virtual_pipeline_model_parallel_size=virtual,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    replica = parallel_state.get_data_parallel_rank()
    config = TransformerConfig(
        num_layers=8 if hybrid else case.layers, hidden_size=16, num_attention_heads=2, num_moe_experts=4,
        moe_router_topk=2, moe_ffn_hidden_size=32, moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=EXPERTS, pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=virtual, moe_router_load_balancing_type="none", add_bias_linear=False,
        moe_router_enable_expert_bias=case.half, moe_router_score_function="sigmoid" if case.half else "softmax",
        gated_linear_unit=True, params_dtype=dtype, pipeline_dtype=dtype, bf16=case.half, attention_dropout=0.0,
        hidden_dropout=0.0, transformer_impl="local", mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2,
        # As Megatron-LM demands of two stages with several chunks: batched, messages to and fro would mix.
        overlap_p2p_comm=case.chunks > 1, batch_p2p_comm=case.chunks == 1, moe_enable_routing_replay=case.fails,
    )  # fmt: skip
    chunks, layer_spec = _model(case, config)
    of_optimizer = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, adam_eps=ADAM_EPS, clip_grad=0.0, bf16=case.half, params_dtype=dtype,
        use_distributed_optimizer=case.distributed, overlap_param_gather=case.distributed,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(of_optimizer, chunks)
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 1e-3, 0, 10, "linear", 0.1, 0.1, 10, "constant")
    fails: list[bool] = []

    def finalize(*args: Any, **kwargs: Any) -> None:
        finalize_model_grads(*args, **kwargs)
        if fails:  # on all ranks, after all messages between stages
            raise Fault(fails.pop())

    config.finalize_model_grads_func, config.grad_scale_func = finalize, optimizer.scale_loss
    starts = [chunk.start_grad_sync for chunk in chunks]
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if virtual else chunks[0].no_sync
    config.grad_sync_func = starts if virtual else starts[0]
    run, layouts, events, job = get_forward_backward_func(), [], [], Job(SEQUENCE, SAMPLES, 5)
    if balanced:
        beside = [] if case.half else [ExpertBalancer(chunks, ExpertConfig(enabled=True, min_gain=0.0), job=job)]
        layers = LayerBalancer(
            chunks, optimizer, scheduler, LayerConfig(enabled=True, interval=3), layer_spec=layer_spec, job=job,
            moves=moves, on_layout=layouts.append, report=events.append,
        )  # fmt: skip
        assert layers.layout == case.before
        balancers = Balancers(*beside, layers)
        run = balancers.schedule(run)

    def forward_step(at: Any, model: Any) -> tuple[Any, Any]:
        draw = torch.Generator().manual_seed(next(at) * 2 + replica)
        tokens = torch.randint(0, VOCABULARY // 8, (SAMPLES, SEQUENCE + 1), generator=draw)
        positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    def schedule(first: int, number: int) -> list[dict[str, Any]]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        seeds = range(first, first + number)
        return run(
            forward_step_func=forward_step, data_iterator=[iter(seeds) for _ in chunks] if virtual else iter(seeds),
            model=chunks, num_microbatches=number, seq_length=SEQUENCE, micro_batch_size=SAMPLES, forward_only=False,
        )  # fmt: skip

    told = []
    for step in range(case.steps):
        if case.fails:
            fails.append(True)
            with pytest.raises(Fault):
                schedule(100 * step + 50, 5)
        given = schedule(100 * step, case.numbers[step % len(case.numbers)])
        told += [float(each["loss"]) for each in given]
        optimizer.step()
        scheduler.step(1)
        if balanced:
            balancers.after_step()
            if step == 4 and moves and case.by_hand:
                layers.move(case.by_hand)
    for chunk in chunks if case.distributed else []:
        chunk.start_param_sync(force_sync=True)
    if case.fails:
        replays = [getattr(module, "router_replay", None) for chunk in chunks for module in chunk.modules()]
        expected = [id(replay) for replay in replays if replay is not None]
        assert expected == [id(replay) for replay in RouterReplay.global_router_replay_instances], "routers of others"
    waiting = len(layers._planner._seconds) if balanced else 0  # steps, which a job of weeks has many of
    assert waiting <= 3, "what is measured is not summed up"
    advised = layers.advise() if balanced and not moves else ""
    if balanced and case.half:
        routers = [part for chunk in chunks for part in chunk.modules() if hasattr(part, "local_tokens_per_expert")]
        assert {part.local_tokens_per_expert.dtype for part in routers} == {torch.int64}, "counts are rounded"
        assert {part.expert_bias.dtype for part in routers} == {torch.float32} and any(
            part.expert_bias.any() for part in routers
        )
    if balanced and moves:
        assert layers.layout == layouts[-1] == (case.by_hand or case.by_cost)
        balancers.close()
    return Ended(told, named_weights(unwrap_model(chunks)), layouts, [event() for event in events], advised)


def _same(found: list[Ended], plain: list[Ended], tolerance: float = 1e-12) -> None:
    for rank, other in zip(found, plain, strict=True):
        np.testing.assert_allclose(rank.losses, other.losses, rtol=tolerance)
    assert_same_weights([rank.weights for rank in found], [rank.weights for rank in plain], tolerance)


@pytest.mark.parametrize(
    "name", sampled(CASES, "distributed optimizer", "two chunks, bfloat16", "numbers that change", "hybrid")
)
def test_layers_move_live_and_change_no_number(pool, name):
    import torch

    found, plain = (pool.run(PIPELINE * EXPERTS, _train, name, on) for on in (True, False))
    # Torch's loops for processors without vectors round bfloat16 by where in memory a tensor is.
    rounds = CASES[name].half and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    _same(found, plain, 0.02 if rounds else 1e-12)
    for rank in found:
        assert rank.layouts == [CASES[name].by_cost, CASES[name].by_hand], "by cost after three steps, then by hand"
    (event,) = [event for rank in found for event in rank.events]
    assert event["action"] == "move" and event["imbalance_after"] < event["imbalance_before"]
    assert not any(rank.layouts for rank in plain)


def test_a_small_step_does_not_make_the_others_look_slow(pool):
    found = pool.run(PIPELINE * EXPERTS, _train, "a small step", True)
    assert [event["action"] for rank in found for event in rank.events] == ["move", "keep", "keep"]
    assert {tuple(rank.layouts) for rank in found} == {("Ett|t*4L",)}


def test_a_loop_without_moves_is_told_the_best_layout(pool):
    found, plain = (pool.run(PIPELINE * EXPERTS, _train, "", on, False) for on in (True, False))
    _same(found, plain)
    assert {(tuple(rank.layouts), rank.advised) for rank in found} == {((), "Ett|t*4L")}


def _read_layouts() -> list[str]:
    """A layout of a hybrid model that is read, then messages about those that are not the model's."""
    from balancing.pipeline.pattern import read_pattern
    from megatron.balanced.layers.source import LayerSource

    here = "M-*E|M-*E"
    source, now = LayerSource(None, None, pattern=here), read_pattern(here).plan(2)  # type: ignore[arg-type]
    told = [source.text(source.read("M-*EM|-*E", now))]
    for wrong in ("M-*E|M-*M", "M-|*E|M-|*E", "M-*E|M-*E|", "M-*E|Q-*E"):
        with pytest.raises(ValueError) as error:
            source.read(wrong, now)
        told.append(str(error.value))
    return told


def test_a_layout_of_another_hybrid_model_is_refused(pool):
    ((read, other, chunks, undivided, unknown),) = pool.run(1, _read_layouts)
    assert read == "M-*EM|-*E"
    assert "M-*E|M-*M has other layers than the model, M-*E|M-*E; only move |" in other
    assert "has 2 chunks a stage, and the model 1; keep the number of |" in chunks
    assert "3 segments" in undivided and "'Q'" in unknown
    assert not any("\n" in line for line in (other, chunks, undivided, unknown))
