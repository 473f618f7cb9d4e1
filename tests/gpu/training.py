"""Runs of training programs for the parts that train: the same command lines on the CPU device and on GPUs.

On a GPU the model is large enough to keep the device busy; on the CPU it is as small as it can be. What flags do not
ask for, a test orders: that layers move at given iterations, that streams are late.
"""

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import runpy
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.program import script

__all__ = ["Orders", "Told", "base", "difference", "local_device", "precisions", "pretrain_rank", "run"]

PP2 = "--pipeline-model-parallel-size 2"
_OWN_LAYERS = "--transformer-impl local --no-persist-layer-norm --no-rope-fusion --disable-jit-fuser"
_STEPS = (
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    "--eval-interval 1000 --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --num-layers 4"
)
_SHAPES = {
    "cpu": "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32",
    "cuda": "--hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512",
}
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
)

# How far a loss may be from that of the unbalanced run, relative: sums in another order, after a few steps of Adam. In
# 8 bits, tokens that are quantized together are others.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 2e-2}


def base(device: str, precision: str = "fp32", data: str = MOCK_DATA, layers: str = _OWN_LAYERS) -> list[str]:
    """The flags that all runs on a device share. layers: flags that choose whose layers run."""
    patience = f"--distributed-timeout-minutes {5 if device == 'cpu' else 1}"
    flags = f"--device {device} {_SHAPES[device]} {_STEPS} {patience} {layers} {data}"
    return [*flags.split(), *(["--bf16"] if precision == "bf16" else [])]


def precisions(device: str) -> tuple[str, ...]:
    """What is tested on the device; the CPU has tests of all precisions elsewhere."""
    return ("fp32", "bf16") if device == "cuda" else ("fp32",)


def local_device(device: str) -> Any:
    """The torch device of this rank."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


@dataclass(frozen=True)
class Orders:
    """What a run does beside its flags.

    moves: layers of each stage from an iteration on.
    late: which streams are late, "side" or "main"; empty for none.
    memory: measure the memory of each move.
    record: the folder in which each rank notes what it receives.
    played: the folder of such a recording. The rank runs alone then, and receives what is noted.
    """

    moves: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    late: str = ""
    memory: bool = False
    record: Path | None = None
    played: Path | None = None


@dataclass
class Told:
    """What one rank tells of a run.

    losses: on the last stage, one an iteration.
    weights: sha256 of each parameter at the end.
    left: whether the rank was released.
    moves: bytes before a move, after it, at most during it, and of the weights of one layer; seconds; and on a GPU the
        bytes that torch's allocator held at most.
    late: how often streams were made late.
    waits: places at which the host waited for the device in the last iteration, as "file:line".
    seconds: of the last iteration. peak: bytes of the device at most. launches: kernels of the iteration before it.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    left: bool = False
    moves: list[tuple[int, int, int, int, float, int]] = field(default_factory=list)
    late: int = 0
    waits: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0
    launches: int = 0


def pretrain_rank(argv: list[str], orders: Orders) -> Told:
    """The body of one rank: the program of `argv`."""
    from megatron.balanced.trainer import arguments

    told, models = Told(), []
    tape = _begin_tape(orders)
    parse = arguments.parse_arguments

    def parse_arguments(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)  # chooses the device; Megatron may be imported from here on
        _install(orders, told, models)
        return parsed

    arguments.parse_arguments = parse_arguments
    sys.argv[:] = [str(script(argv)), *argv]
    sys.modules.pop("pretrain_gpt", None)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
        told.left = True
    if not told.left:
        parameters = [pair for chunk in models[-1] for pair in chunk.named_parameters()]
        told.weights = {name: _digest(parameter) for name, parameter in parameters}
    if orders.record:
        tape.write(orders.record / f"{os.environ['RANK']}.tape")
    return told


def replay_rank(argv: list[str], orders: Orders, rank: int, ranks: int) -> Told:
    """The body of one rank of `ranks` that runs alone, by a recording: there is no other to agree with at the start,
    nor a first rank that would name it."""
    from megatron.balanced.trainer import arguments, rendezvous

    rendezvous._start[:] = ["alone"]
    join = arguments.join_job
    arguments.join_job = lambda **unused: join(alone=True)
    arguments.check_agreement = lambda *unused: None
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    return pretrain_rank(argv, orders)


def _begin_tape(orders: Orders) -> Any:
    from tests.gpu.host_group import Tape, use_host_groups

    if orders.record or orders.played:
        played = orders.played and Tape.read(orders.played / f"{os.environ['RANK']}.tape")
        tape = played or Tape()
        use_host_groups(tape, record=orders.record is not None)
        return tape
    return None


def _digest(parameter: Any) -> str:
    import torch

    return hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _install(orders: Orders, told: Told, models: list[Any]) -> None:
    from megatron.training import training

    from tests.gpu.late_streams import make_late
    from tests.support.moving import move_at
    from tests.support.pool_server import shrink_mock_data

    shrink_mock_data()
    build, step = training.setup_model_and_optimizer, training.train_step
    steps = itertools.count(1)

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        models.append(built[0])
        return built

    def train_step(*args: Any, **kwargs: Any) -> Any:
        with _measured(told, next(steps)):
            result = step(*args, **kwargs)
        if "lm loss" in result[0]:
            told.losses.append(float(result[0]["lm loss"]))
        return result

    functools.update_wrapper(train_step, step)  # its signature is checked before it is patched
    training.setup_model_and_optimizer, training.train_step = setup_model_and_optimizer, train_step
    if orders.moves:
        move_at(orders.moves)
    if orders.late:
        make_late(orders.late, told)
    if orders.memory:
        _measure_moves(told)


@contextlib.contextmanager
def _measured(told: Told, number: int) -> Iterator[None]:
    """Measure an iteration: kernels of the third, time, waits of the host and memory of all others."""
    import torch

    from megatron.balanced.cpu.device import is_cpu

    if is_cpu():
        begin = time.perf_counter()
        yield
        told.seconds = time.perf_counter() - begin
        return
    torch.cuda.synchronize()
    if number == 3:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            yield
            torch.cuda.synchronize()
        told.launches = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
        return
    begin = time.perf_counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    told.seconds = time.perf_counter() - begin
    told.peak = torch.cuda.max_memory_allocated()
    told.waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


def _measure_moves(told: Told) -> None:
    import torch

    from megatron.balanced.cpu.device import is_cpu
    from megatron.balanced.layers import balancer as layers
    from tests.layers.test_memory import _Live

    move = layers.LayerBalancer.move

    def measured(self: Any, plan: Any) -> Any:
        gc.collect()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if is_cpu():
            with _Live() as live:
                before = live.now
                moved = move(self, plan)
                gc.collect()
            after, peak, reserved = live.now, live.peak, 0
        else:
            before = torch.cuda.memory_allocated()
            with _kept_peak() as peaks:
                moved = move(self, plan)
            gc.collect()
            after, (peak, reserved) = torch.cuda.memory_allocated(), map(max, zip(*peaks, strict=True))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        layer = self.mover.models()[0].decoder.layers[0]
        weights = sum(p.numel() * p.element_size() for p in layer.parameters())
        told.moves.append((before, after, peak, weights, seconds, reserved))
        return moved

    layers.LayerBalancer.move = measured


@contextlib.contextmanager
def _kept_peak() -> Iterator[list[tuple[int, int]]]:
    """Bytes allocated and reserved at most while this lasts, also where what is measured resets the device's own
    maximum, as a move does at its end: the maxima at each reset and at the end."""
    import torch

    reset, peaks = torch.cuda.reset_peak_memory_stats, []

    def note() -> None:
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    def noted(*args: Any) -> None:
        note()
        reset(*args)

    reset()
    torch.cuda.reset_peak_memory_stats = noted
    try:
        yield peaks
    finally:
        torch.cuda.reset_peak_memory_stats = reset
        torch.cuda.synchronize()
        note()


def run(ranks: Any, count: int, argv: list[str], orders: Orders = Orders(), **options: Any) -> list[Told]:
    """Train on `count` ranks. A failure names the command line."""
    try:
        return ranks.run(count, pretrain_rank, argv, orders, **options)
    except Exception as error:
        error.add_note(f"pretrain_gpt.py {' '.join(argv)}")
        raise


def losses(told: list[Told]) -> list[float]:
    """The losses of a run, of which the ranks that have them must agree."""
    seen = [rank.losses for rank in told if rank.losses]
    assert seen and all(one == seen[0] for one in seen), f"ranks disagree: {seen}"
    return seen[0]


def difference(told: list[Told], reference: list[Told]) -> float:
    """The largest relative difference of a loss."""
    pairs = list(zip(losses(told), losses(reference), strict=True))
    assert all(theirs > 0 for _, theirs in pairs)
    return max(abs(ours - theirs) / theirs for ours, theirs in pairs)


def replicated(folder: Path) -> int:
    """How often experts got replicas, by the events of a run."""
    return (folder / "events.jsonl").read_text().count('"replicate"')
