"""Tests of wiring that only mutants (`tests/mutants`) showed to be untested."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from balancing.cluster import Cluster
from balancing.sequences.sequence_plan import SequencePlan
from tests.megatron.test_dropout import _all_differ, _digest, _draws
from tests.support.events import events_in
from tests.support.moving import at_end_of_step, move_at
from tests.support.pool import Pool
from tests.support.sequence_plans import made_for, nodes_of, random_plan
from tests.support.settings import scheme_flags, settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, assert_same, differences, train, train_rank

PP2 = "--pipeline-model-parallel-size 2"


def _asked_scales() -> list[float]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.balanced.sequences.attention import (
        BatchAttention,
        DocumentPositions,
        PlannedSequences,
        SequenceCoreAttention,
    )

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    asked: list[float] = []

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, sink: None
    ) -> torch.Tensor:
        asked.append(softmax_scale)
        return q + 1

    of_layers: Any = attention
    planned = PlannedSequences(
        attention=BatchAttention((of_layers,), 5), positions=DocumentPositions(torch.arange(6), 6)
    )
    parts = [torch.zeros(6, 1, 4, 8) for _ in range(3)]
    for scale in (None, 0.3):
        output = SequenceCoreAttention(config, 1, softmax_scale=scale)(*parts, None, packed_seq_params=planned)
        assert output.shape == (6, 1, 32) and output[:5].min() == 1 and not output[5].any()
    return asked


def test_a_softmax_scale_reaches_the_engine(pool: Pool) -> None:
    """Models with a scale of their own have it, others the usual one; padding comes out as zero."""
    assert pool.run(1, _asked_scales) == [[8**-0.5, 0.3]]


def test_heads_on_other_ranks_have_masks_of_their_own(pool: Pool) -> None:
    """With streams that follow layers, as without them."""
    flags = (
        f"{PP2} --tensor-model-parallel-size 2 --balance-layers --init-method-std 0.1 --train-iters 1 "
        "--global-batch-size 2 --make-vocab-size-divisible-by 64"
    )
    first, second, third, fourth = pool.run(4, _draws, [*MODEL, *MOCK_DATA, *flags.split()])
    for one, other in ((first, second), (third, fourth)):
        assert _all_differ(one["attention"], other["attention"])
        assert one["hidden"] == other["hidden"]


def _rope_scaling(argv: list[str]) -> float:
    from megatron.balanced.trainer.arguments import parse_arguments
    from megatron.balanced.trainer.model import model_config

    args, config = parse_arguments(argv)
    return model_config(args, config.experts, config.sequences).rope_scaling_factor


def test_positions_are_scaled_by_the_factor_of_the_flag(pool: Pool) -> None:
    flags = "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32"
    assert pool.run(1, _rope_scaling, [*MODEL, *MOCK_DATA, *flags.split()]) == [32]


def _scale_after_a_move(argv: list[str], moves: bool) -> float:

    scales: list[float] = []
    move_at({3: ((1,), (3,))} if moves else {})
    at_end_of_step(lambda balancer: scales.append(float(balancer.run.optimizer.get_loss_scale())))
    train_rank(argv, False)
    return scales[-1]


def test_the_scale_of_fp16_survives_a_move(pool: Pool) -> None:
    """It has doubled before the move, and once more after it."""
    flags = (
        f"{PP2} --fp16 --initial-loss-scale 1024 --loss-scale-window 2 --balance-layers --global-batch-size 2 "
        "--attention-dropout 0 --hidden-dropout 0"
    )
    argv = [*MODEL, *MOCK_DATA, *flags.split()]
    assert pool.run(2, _scale_after_a_move, argv, True) == pool.run(2, _scale_after_a_move, argv, False) == [4096.0] * 2


def _run_alone() -> float:
    """The largest difference between tokens that a layer runs alone and the same tokens where the layer sees all and
    a mask hides the others."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from examples.dynamic_models.config import DynamicsConfig
    from examples.dynamic_models.layer import dynamic_layer

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.set_default_dtype(torch.float64)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=torch.float64, init_method=lambda weight: torch.nn.init.normal_(weight, std=0.5),
    )  # fmt: skip
    layer = dynamic_layer(DynamicsConfig())(config, get_gpt_layer_local_spec().submodules)
    layer.double()
    hidden = torch.randn(10, 2, 32)
    angles = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True)(10)
    index = torch.tensor([[1, 0], [4, 3], [5, 7], [9, 8]])
    alone, _ = layer._run_some(hidden, index, torch.ones(4, 2, 1), attention_mask=None, rotary_pos_emb=angles)
    hidden_keys = torch.ones(2, 10, dtype=torch.bool).scatter(1, index.T, False)
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1) | hidden_keys[:, None, None, :]
    mask[..., 0] &= ~hidden_keys[:, None, None, :].expand(2, 1, 10, 10).all(-1)
    whole, _ = TransformerLayer.forward(layer, hidden, attention_mask=mask, rotary_pos_emb=angles)
    rows = index[:, :, None].expand(-1, -1, 32)
    assert not torch.equal(alone, hidden)
    return float((alone.gather(0, rows) - whole.gather(0, rows)).abs().max())


def test_tokens_run_alone_keep_their_positions(pool: Pool) -> None:
    (difference,) = pool.run(1, _run_alone)
    assert difference < 1e-12


def test_measuring_plasticity_changes_no_number(pool: Pool) -> None:
    """The front layer is measured in each iteration, and nothing freezes yet."""
    base = [*MODEL, *MOCK_DATA, *EXACT, *"--untie-embeddings-and-output-weights --global-batch-size 2".split()]
    measured = "--freeze-layers 2 --freeze-layers-interval 1 --freeze-layers-start 100 "
    measured += scheme_flags(freeze_layers_policy="plasticity")
    run, plain = (train(pool, 1, flags, base=base, parameters=True) for flags in (measured, ""))
    assert_same(run, plain)


EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
)


def test_shared_slots_of_more_layers_than_buffers(pool: Pool, tmp_path: Path) -> None:
    """Four layers on one stage: in the backward pass a buffer holds another layer's replicas than it did in the forward
    pass, until they are brought again."""
    base = [*MODEL, *MOCK_DATA, *EXACT, *EXPERTS.split(), *"--global-batch-size 4 --init-method-std 0.1".split()]
    shared = f"--balance-experts {settings('experts', replica_mode='shared', min_gain=0)}"
    run = train(pool, 2, f"{shared} --balance-report {tmp_path}", base=base, parameters=True)
    assert max(differences(run, train(pool, 2, base=base, parameters=True))) <= 1e-12
    events = events_in(tmp_path)
    layers = [{e["layer"] for e in events if e["action"] == "replicate" and e["iteration"] == n} for n in (2, 3, 4)]
    assert all(len(found) > 2 for found in layers), layers


def _two_layers_at_once() -> list[int]:
    """Tags of all messages that one rank starts for two layers with two experts each, weights and gradients, in
    two model chunks that share a group."""
    import torch.distributed as dist

    from balancing.experts.engine import relay
    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    dist.init_process_group("gloo")
    homes = [[[torch.ones(3, requires_grad=True)] for _ in range(2)] for _ in range(2)]
    for (weight,) in (expert for layer in homes for expert in layer):
        weight.main_grad = torch.zeros(3)
    placement = ReplicaPlacement(np.array([0, 0, 1, 1]), [[2, 3], [0, 1]])
    tags: list[int] = []
    start = relay.start_message

    def started(operation: dist.P2POp) -> dist.Work:
        if operation.op is dist.isend:
            tags.append(operation.tag)
        return start(operation)

    relay.start_message = started
    for first in (0, 2):
        slots = ReplicaSlots(
            HomeExperts(homes, gradient=lambda weight: weight.main_grad, first_layer=first),
            2,
            dist.group.WORLD,
            shared=False,
        )
        slots.begin_step([placement] * 2, 1)
        for layer in (0, 1):
            slots.acquire(layer, forward=True)
        for layer in (1, 0):
            slots.acquire(layer, forward=False)
            sum(weight.sum() for (weight,) in slots.leaves(layer)).backward()
            slots.accumulate_gradients(layer)
            slots.end_pass(layer)
        slots.end_step()
    return tags


def test_messages_of_two_layers_do_not_meet(pool: Pool) -> None:
    """Each of the sixteen messages of a rank has a number of its own, or one could be taken for another."""
    for tags in pool.run(2, _two_layers_at_once):
        assert len(tags) == len(set(tags)) == 16


def _routed_messages(plan: SequencePlan, cluster: Cluster) -> list[tuple[str, int, int]]:
    """Kind, peer and number of each message that a rank starts in a forward pass over two nodes."""
    import torch.distributed as dist

    from balancing.sequences import SequenceAttention, compile_rank
    from balancing.sequences.engine import gather, transport

    gather.TILE = 8
    dist.init_process_group("gloo")
    started: list[tuple[str, int, int]] = []
    start = transport.start_message

    def noted(operation: dist.P2POp) -> dist.Work:
        started.append((operation.op.__name__, operation.peer, operation.tag))
        return start(operation)

    transport.start_message = noted
    rank = dist.get_rank()
    tokens = int(plan.linear_tokens[rank])
    q, k, v = (torch.ones(tokens, 2, 4) for _ in range(3))
    plan = made_for(plan, cluster, item_bytes=4)
    SequenceAttention(plan, program=compile_rank(plan, rank, routing=2))(q, k, v)
    dist.destroy_process_group()
    return started


def test_slices_of_two_exchanges_do_not_meet(pool: Pool) -> None:
    """Several turns of gathering are under way one after the other, and those who hand on may be late."""
    plan = random_plan((97, 130, 3), 6, 2, exchange="gather", linear="random")
    # So that there are as many turns as there may be.
    cluster = replace(nodes_of(6, 2, nics=2), message_seconds=1e-12, launch_seconds=0.0, host_seconds=0.0)
    for started in pool.run(6, _routed_messages, plan, cluster):
        assert len(started) == len(set(started)) > 20


def _generators_around_a_move(argv: list[str]) -> list[str]:
    """The states of this rank's random generators before a move and after it."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron.balanced.layers.balancer import LayerBalancer

    move_at({1: ((4,), (2,))})
    move, states = LayerBalancer.move_to, []

    def note() -> None:
        tracked = get_cuda_rng_tracker().get_states()
        states.append(_digest(torch.get_rng_state(), torch.cuda.get_rng_state(), *tracked.values()))

    def watched(self: Any, plan: Any) -> Any:
        note()
        moved = move(self, plan)
        note()
        return moved

    LayerBalancer.move_to = watched
    train_rank(argv, False)
    return states


def test_building_a_layer_draws_nothing(pool: Pool) -> None:
    """The first stage builds a layer whose router torch fills with random numbers."""
    flags = f"{PP2} --balance-layers --num-layers 6 --train-iters 2 --global-batch-size 2 "
    flags += scheme_flags(mixture_of_depths=0.5)
    for before, after in pool.run(2, _generators_around_a_move, [*MODEL, *MOCK_DATA, *flags.split()]):
        assert before == after


def test_pruned_alike_with_and_without_overlap(pool: Pool) -> None:
    """A distributed optimizer that has yet to gather its weights has them pruned at the same threshold."""
    base = [*MODEL, *MOCK_DATA, *"--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer".split()]
    base += f"{scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=3, prune_interval=1)} --lr 1e-2".split()
    late, ready = (
        train(pool, 2, flags, base=base, parameters=True)
        for flags in ("--overlap-grad-reduce --overlap-param-gather", "--overlap-grad-reduce")
    )
    assert_same(late, ready)
