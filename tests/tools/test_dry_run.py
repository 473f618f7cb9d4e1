"""A dry run describes a job on any machine: who plans together and what slots take are those of the job itself."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import plan_lines_of, run_python
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE

REPOSITORY = Path(__file__).resolve().parents[2]
# A job of 1024 GPUs.
JOB = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 1024 --train-iters 10 --lr 1e-3 --eval-interval 100 --eval-iters 0 "
    "--num-experts 64 --moe-ffn-hidden-size 1536 --swiglu --disable-bias-linear --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --moe-grouped-gemm --moe-token-dispatcher-type alltoall --attention-dropout 0 "
    "--hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 4 "
    "--pipeline-model-parallel-size 4 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 "
    "--transformer-impl transformer_engine"
).split()
BALANCE = "--balance-experts --balance-layers --balance-sequences".split()


def test_a_cluster_is_described_from_a_machine_without_gpus():
    flags = [*BALANCE, "--fill-with-weight-gradients", "--balance-dry-run"]
    done = run_python("pretrain_gpt.py", *MOCK_DATA, *JOB, *flags, WORLD_SIZE="1024")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("> device: a GPU") and "1024 rank(s), 8 a node; all assumed" in lines[0]
    assert any(line.startswith("patch  megatron.training.training:train_step: ") for line in lines)
    assert lines[-6:] == [
        "plan   --balance-experts: 64 expert-parallel groups of 16 ranks on 2 nodes, each with plans of its own; the "
        "first of ranks 0-15",
        "slots  --expert-replica-slots 2: beside 4 home expert(s), in each of the 8 MoE layer(s) of a rank",
        # 2 slots x 3 x 4096 x 1536 parameters x (2 + 4 bytes) x 8 layers, or 2 buffers
        "memory experts.replica_mode auto: 1.688 GiB resident, or 0.422 GiB shared, on the rank with the most",
        "plan   --balance-sequences: 256 context-parallel groups of 4 ranks on 1 node, each with plans of its own; the "
        "first of ranks 0-6 in steps of 2",
        "plan   --balance-layers: all 1024 ranks make one plan; layers move along 256 pipelines of 4 ranks, the first "
        "of ranks 0-768 in steps of 256",
        "gain   not forecast without --cluster, which says how fast the machine is",
    ]
    assert len(lines) < 31, "Megatron-LM's arguments are not what a dry run is asked for"


def test_mamba_layers_see_whole_documents(pool):
    pattern = "--hybrid-layer-pattern M-M*ME|M-M*ME|M-M*ME|M-M*ME".split()
    flags = [*MOCK_DATA, *JOB, *BALANCE, *pattern, *settings("experts", late_slots=1).split()]
    ((code, said, lines),) = pool.run(1, plan_lines_of, flags, {"WORLD_SIZE": "1024"})
    assert code == 0, said
    assert "memory experts.late_slots 1: 0.105 GiB more" in lines
    shared = "12 Mamba layers (M) see whole documents, with 16 heads of all tokens on each of 4 ranks"
    assert f"plan   --balance-sequences: {shared}" in lines
    moved = "moves 12 Mamba, 4 MLP, 4 attention, 4 MoE layers one by one, starting from M-M*ME|M-M*ME|M-M*ME|M-M*ME"
    assert f"plan   --balance-layers: {moved}" in lines


@pytest.mark.parametrize(
    "flags, ranks, words",
    [
        ("--fp8-format e4m3", "1024", ("--fp8-recipe delayed", "--balance-experts", "use --fp8-recipe tensorwise")),
        ("--pipeline-model-parallel-size 3", "1024", ("world size (1024) is not divisible", "=24)")),
        ("--expert-tensor-parallel-size 3", "1024", ("1024 ranks", "--expert-tensor-parallel-size 3 x --expert-model")),
        ("", "1000", ("world size (1000) is not divisible", "=32)")),
        ("", "many", ("WORLD_SIZE many",)),
        ("", "0", ("WORLD_SIZE 0",)),
        ("--hidden-size 4100", "1024", ("--hidden-size 4100 must be a multiple of --num-attention-heads 32",)),
        ("--cluster b9000", "1024", ("--cluster", "b9000")),
        ("--device tpu", "1024", ("--device", "tpu", "'cuda', 'cpu'")),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --mtp-num-layers 2 "
            "--mtp-use-repeated-layer",
            "1024",
            ("--moe-flex-dispatcher-backend ncclep", "drop --mtp-use-repeated-layer"),
        ),
        ("--use-megatron-fsdp --spec a b", "1024", ("--spec a b", "--use-megatron-fsdp")),
    ],
)
def test_a_refusal_is_one_line(pool, flags, ranks, words):
    argv = [*MOCK_DATA, *JOB, *BALANCE, *flags.split()]
    ((code, said, _),) = pool.run(1, plan_lines_of, argv, {"WORLD_SIZE": ranks})
    lines = [line for line in said.splitlines() if "error" in line]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("pretrain_gpt.py: error: "), (code, said)
    for word in words:
        assert word in lines[0]


def test_the_hosts_that_a_launcher_started_are_not_assumed(pool):
    """Under a launcher, and on CPUs, Transformer Engine must be there."""
    argv = [*MODEL[2:], *MOCK_DATA, *EXACT[1:], "--transformer-impl", "transformer_engine"]
    alone = {"WORLD_SIZE": "1"}
    ((code, said, _),) = pool.run(1, plan_lines_of, argv, alone)
    assert code == 0, said
    ((_, said, _),) = pool.run(1, plan_lines_of, ["--device", "cpu", *argv], alone)
    assert "> device: cpu" in said and "assumed" not in said
    launched = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ((_, said, _),) = pool.run(1, plan_lines_of, argv, alone | launched)
    assert "assumed" not in said


@pytest.mark.exhaustive
def test_a_large_domain_has_groups(pool):
    """16,384 ranks, tensor parallel 2 and context parallel 2: two domains of 4096 x 2 ranks, in 128 groups each."""
    flags = (
        "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
        "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --eval-interval 100 --eval-iters 0 --bf16 --swiglu "
        "--transformer-impl transformer_engine --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 2 --dataloader-inter-document-masking --attention-dropout 0 --hidden-dropout 0 "
        "--balance-sequences --sequence-domain data"
    ).split()
    ((_, _, (plan, *_)),) = pool.run(1, plan_lines_of, [*MOCK_DATA, *flags], {"WORLD_SIZE": "16384"})
    assert plan == (
        "plan   --balance-sequences: 256 data-parallel groups of 64 ranks on 16 nodes, each with plans of its own; "
        "the first of ranks 0-126 in steps of 2"
    )


# Ranks in the flags of four; every axis has another group on rank 0 than on rank 3.
LAYOUTS = {
    "interleaved stages, dense layers, prediction": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --moe-layer-freq [0]*2+[1]*6 --mtp-num-layers 1 "
    f"{settings('experts', replica_mode='resident')}",
    "ranks of a tensor share experts": "--tensor-model-parallel-size 2 --sequence-parallel "
    f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {settings('experts', replica_mode='shared')}",
    "data before stages": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-tp-pp-dp-mapping "
    f"{settings('experts', replica_mode='resident')}",
    "uneven stages, spread sequences": "--pipeline-model-parallel-size 2 --context-parallel-size 2 "
    f"--decoder-first-pipeline-num-layers 3 --expert-model-parallel-size 2 --balance-sequences "
    f"{settings('experts', replica_mode='resident')}",
}


def _compare(flags: list[str]) -> dict[str, tuple[object, object]]:
    """Train a step on this rank. Returns what a dry run tells of it and what is, by subject."""
    import torch.distributed as dist
    from megatron.core import mpu

    from balancing.experts.engine.slots import ReplicaSlots
    from megatron.balanced.experts.moe_layer import BalancedMoELayer
    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trainer.arguments import parse_arguments
    from megatron.balanced.trainer.dry_run import groups_along, model_of, moe_layers, slot_bytes
    from megatron.balanced.trainer.train import train

    args, config = parse_arguments(flags)
    found: dict[str, tuple[object, object]] = {}

    class Look(StepCallback):
        def attach(self, chunks: list) -> None:
            stage, slots = mpu.get_pipeline_model_parallel_rank(), config.experts.replica_slots
            shared = config.experts.replica_mode == "shared"
            own = [[m for m in chunk.modules() if isinstance(m, BalancedMoELayer)] for chunk in chunks]
            told = moe_layers(model_of(args))[stage]
            found["layers"] = told, [len(layers) for layers in own]
            parameters = [
                [[list(e.parameters()) for e in layer.experts.local_experts] for layer in c] for c in own if c
            ]
            taken = sum(ReplicaSlots.bytes_needed(homes, slots, shared=shared) for homes in parameters)
            found["bytes"] = slot_bytes(model_of(args), told, slots, shared=shared), taken
            for axis, group in (
                ("ep", mpu.get_expert_model_parallel_group()),
                ("cp", mpu.get_context_parallel_group()),
                ("pp", mpu.get_pipeline_model_parallel_group()),
            ):
                groups = groups_along(args, axis, for_experts=axis == "ep")
                (told_ranks,) = [ranks for ranks in groups if dist.get_rank() in ranks]
                found[axis] = told_ranks, dist.get_process_group_ranks(group)

    train(args, config, [Look()])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_told_is_what_is_built(pool, layout):
    flags = [*MODEL, *MOCK_DATA, *EXACT, *MOE, "--train-iters", "1", "--balance-experts", *LAYOUTS[layout].split()]
    for found in pool.run(4, _compare, flags):
        assert found.keys() == {"layers", "bytes", "ep", "cp", "pp"}
        for subject, (told, built) in found.items():
            assert told == built, subject
        assert found["bytes"][1]


def _groups(draws: list[dict[str, Any]]) -> list[tuple[str | None, str | None]]:
    """For each layout what a run says of it at its start, a dry run as well, and what Megatron-LM says when it forms
    groups; None if nothing."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron.balanced.trainer.checks.model import check_groups

    parallel_state.create_group = lambda *args, **kwargs: None
    dist.is_initialized, dist.get_rank = lambda: True, lambda *group: 0
    found = []
    for draw in draws:
        dist.get_world_size = lambda *group, ranks=draw["world_size"]: ranks  # type: ignore[misc]
        ours = theirs = None
        try:
            check_groups(Namespace(expert_gtp_weight_remat_size=1, **draw))
        except ValueError as error:
            ours = str(error)
        sizes = {name: value for name, value in draw.items() if name.endswith(("parallel_size", "instances"))}
        sizes.pop("data_parallel_size")
        order = "tp-cp-ep-pp-dp" if draw["use_tp_pp_dp_mapping"] else "tp-cp-ep-dp-pp"
        try:
            parallel_state.initialize_model_parallel(**sizes, order=order, create_gloo_process_groups=False)
        except (RuntimeError, AssertionError) as error:
            theirs = str(error)
        parallel_state.destroy_model_parallel()
        found.append((ours, theirs))
    return found


def test_sizes_of_groups_are_refused_as_megatron_does(pool):
    """A dry run forms none."""
    flags = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
             "expert_model_parallel_size", "expert_tensor_parallel_size"]  # fmt: skip
    random, draws = np.random.default_rng(0), []
    while len(draws) < 300:
        sizes = random.choice([1, 1, 2, 3, 4], len(flags)).tolist()
        draw = dict(zip(flags, sizes, strict=True)) | {"world_size": int(random.choice([4, 8, 12, 16, 24]))}
        data, rest = divmod(draw["world_size"], sizes[0] * sizes[1] * sizes[2])
        draw |= {"num_distributed_optimizer_instances": int(random.choice([1, 1, 2, 3])), "data_parallel_size": data}
        if not rest:  # which Megatron-LM looks at before
            draws.append(draw | {"use_tp_pp_dp_mapping": bool(random.integers(2))})
    (found,) = pool.run(1, _groups, draws)
    assert 50 < sum(theirs is not None for _, theirs in found) < 250
    for draw, (ours, theirs) in zip(draws, found, strict=True):
        assert (ours is None) == (theirs is None), (draw, ours, theirs)


def test_a_dry_run_refuses_a_model_that_megatron_refuses(pool):
    """Also on CPUs, where no machine is assumed."""
    argv = ["--device", "cpu", *MODEL[2:], *MOCK_DATA, *EXACT, *MOE, "--moe-shared-expert-intermediate-size", "-1"]
    assert pool.run(1, _dry_run, argv) == [2]
    argv[-1] = "48"
    assert pool.run(1, _dry_run, argv) == [0]


def _dry_run(argv: list[str]) -> object:
    from tests.support.command import run_command

    return run_command([*argv, "--balance-dry-run"])[0]
