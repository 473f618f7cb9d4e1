"""Runs of training programs for the parts that train: the same command lines on the CPU device and on GPUs.

On a GPU the model is large enough to keep the device busy; on the CPU it is as small as it can be. What flags do not
ask for, a part orders: that layers move at given iterations, that streams are late. Weights are drawn by their names,
so that they depend neither on the device nor on the layout, and no run waits for another one's checkpoint.
"""

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import re
import runpy
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.program import script

__all__ = ["Comparison", "Orders", "Told", "base", "difference", "local_device", "precisions", "pretrain_rank", "run"]

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
REORDERED = 1e-5  # of fp32 where every token goes to the same experts: sums in another order, and nothing else


def base(
    device: str, precision: str = "fp32", data: str = MOCK_DATA, layers: str = _OWN_LAYERS, shape: str = ""
) -> list[str]:
    """The flags that all runs on a device share. layers: flags that choose whose layers run. shape: the device whose
    model it is, by default this one."""
    patience = f"--distributed-timeout-minutes {5 if device == 'cpu' else 1}"
    flags = f"--device {device} {_SHAPES[shape or device]} {_STEPS} {patience} {layers} {data}"
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
    routes: note which experts each token is sent to.
    replayed: such notes of a run before, of each rank: its tokens go to the same experts. Empty: routes are free.
    skew: load of the busiest expert-parallel rank over the mean that routing is forced to; 0 leaves it.
    clock: only take the time of iterations.
    drawn: whether weights are drawn by their names.
    """

    moves: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    late: str = ""
    memory: bool = False
    routes: bool = False
    replayed: tuple[dict[int, list[bytes]], ...] = ()
    skew: float = 0.0
    clock: bool = False
    drawn: bool = True


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
    seconds: of each iteration. peak: bytes of the device at most. launches: kernels of the third iteration.
    routes: of each layer by its number, the experts of its tokens as packed bits, one entry a micro-batch.
    rounding: whose products of fp32 are rounded to TF32 here.
    layers: of each stage at the end, where layers may move.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    left: bool = False
    moves: list[tuple[int, int, int, int, float, int]] = field(default_factory=list)
    late: int = 0
    waits: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    launches: int = 0
    routes: dict[int, list[bytes]] = field(default_factory=dict)
    rounding: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


def pretrain_rank(argv: list[str], orders: Orders) -> Told:
    """The body of one rank: the program of `argv`."""
    from megatron.balanced.trainer import arguments

    told, models = Told(), []
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
    told.rounding = _rounding()
    return told


def _rounding() -> tuple[str, ...]:
    """Whose products of fp32 are rounded to TF32, which has ten bits, on this device."""
    import torch

    from megatron.balanced.cpu.device import is_cpu

    if is_cpu():
        return ()
    from megatron.core.extensions import transformer_engine as engine

    exact, one = torch.full((64, 64), 1 + 2**-12, device="cuda"), torch.eye(64, device="cuda")
    products = {"torch": exact @ one}
    if getattr(engine, "te_general_gemm", None) is not None:
        found = engine.te_general_gemm(exact, one, out_dtype=torch.float32, layout="TN")
        products["Transformer Engine"] = found[0] if isinstance(found, (tuple, list)) else found
    return tuple(name for name, product in products.items() if not bool((product == exact).all()))


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
        if orders.drawn:
            draw_weights(built[0])
            built[1].reload_model_params()
        return built

    def train_step(*args: Any, **kwargs: Any) -> Any:
        with _measured(told, next(steps), orders.clock):
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
    if orders.routes or orders.skew or orders.replayed:
        from tests.gpu.routes import watch_routes

        mine = orders.replayed[int(os.environ["RANK"])] if orders.replayed else None
        watch_routes(told.routes if orders.routes else None, orders.skew, mine)


def draw_weights(chunks: Any) -> None:
    """Draw all matrices of a model by their names; what else it has starts alike everywhere."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    rank = parallel_state.get_expert_model_parallel_rank()
    for chunk in unwrap_model(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.dim() < 2:
                continue
            if name.startswith("decoder.layers."):
                _, _, place, rest = name.split(".", 3)
                name = f"{chunk.decoder.layers[int(place)].layer_number}.{rest}"
            if (expert := re.search(r"local_experts\.(\d+)|experts\..*\.weight(\d+)$", name)) is not None:
                here = int(expert[1] or expert[2])
                own = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
                if here >= own:  # a slot of a replica, which gets its weights from its expert
                    continue
                layer, _, rest = name.partition(".")
                rest = re.sub(r"(local_experts\.|weight)\d+", r"\1", rest)
                name = f"{layer}.{rest} of expert {rank * own + here}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            scale = 0.035 if "linear_proj" in name or "linear_fc2" in name else 0.1
            drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(parameter.shape, np.float32)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(drawn * np.float32(scale)))


@contextlib.contextmanager
def _measured(told: Told, number: int, only_time: bool) -> Iterator[None]:
    """Measure an iteration: kernels of the third, time, waits of the host and memory of all others."""
    import torch

    from megatron.balanced.cpu.device import is_cpu

    if is_cpu() or only_time:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        yield
        torch.cuda.synchronize()
        told.seconds.append(time.perf_counter() - begin)
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
    told.seconds.append(time.perf_counter() - begin)
    told.peak = torch.cuda.max_memory_allocated()
    told.waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


def _measure_moves(told: Told) -> None:
    import torch

    from megatron.balanced.cpu.device import is_cpu
    from megatron.balanced.layers import balancer as layers
    from tests.layers.test_memory import _Live

    move = layers.LayerBalancer.move_to

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

    layers.LayerBalancer.move_to = measured


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


def run(trial: Any, count: int, argv: list[str], orders: Orders = Orders(), **options: Any) -> list[Told]:
    """Train on `count` ranks. A failure names the command line."""
    try:
        return trial.run(count, pretrain_rank, argv, orders, **options)
    except Exception as error:
        error.add_note(f"pretrain_gpt.py {' '.join(argv)}")
        raise


def losses(told: list[Told]) -> list[float]:
    """The losses of a run, of which the ranks that have them must agree."""
    seen = [rank.losses for rank in told if rank.losses]
    assert seen and all(one == seen[0] for one in seen), f"ranks disagree: {seen}"
    return seen[0]


def apart(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The relative difference of each loss."""
    assert all(loss > 0 for loss in theirs)
    return [abs(one - other) / other for one, other in zip(ours, theirs, strict=True)]


def difference(told: list[Told], reference: list[Told]) -> float:
    """The largest relative difference of a loss."""
    return max(apart(losses(told), losses(reference)))


class Comparison:
    """Losses of runs beside those of a reference, iteration by iteration, and the reference's own noise.

    reference, again: the same run twice. recorded: the losses of a CPU in the first iterations, if there are any.
    """

    def __init__(
        self,
        trial: Any,
        precision: str,
        reference: list[Told],
        again: list[Told],
        recorded: Sequence[float] = (),
    ) -> None:
        self._trial, self._precision, self._reference = trial, precision, losses(reference)
        self._largest = (0.0, "")
        noise = apart(losses(again), self._reference)
        self._noise = f"the reference once more {_numbers(noise)}"
        self._figure = f"noise {max(noise):.1e}"
        if recorded:
            of_cpu = apart(self._reference[: len(recorded)], recorded)
            trial.detail(
                f"{precision}, the reference {_losses(self._reference)}; a CPU's {_losses(recorded)}, "
                f"apart {_numbers(of_cpu)}"
            )
            self._figure += f", a CPU's within {max(of_cpu):.1e}"
            assert max(of_cpu) <= TOLERANCE[precision], f"{precision}: {max(of_cpu):.1e} from a CPU's losses"
        rounding = {name for rank in reference for name in rank.rounding}
        assert not (precision == "fp32" and rounding), f"{rounding} multiplies in TF32 where fp32 is meant"

    def check(self, what: str, told: list[Told], *, within: float = 0.0, iterations: int | None = None) -> None:
        """Compare a run, whose losses must be within a tolerance.

        within: the tolerance, by default that of the precision.
        iterations: of the beginning, whose losses are compared; None for all. The others are only shown.
        """
        found = apart(losses(told), self._reference)
        self._trial.detail(
            f"{self._precision}, {what}: losses {_losses(losses(told))}, the reference's {_losses(self._reference)}, "
            f"apart {_numbers(found)}, {self._noise}"
        )
        largest = max(found[:iterations], default=0.0)
        self._largest = max(self._largest, (largest, what))
        assert largest <= (within or TOLERANCE[self._precision]), (
            f"{what}, {self._precision}: a loss differs by {largest:.1e} of the reference, {_numbers(found)} by "
            f"iteration; {self._noise}"
        )

    def figure(self) -> None:
        """Tell the largest difference."""
        largest, what = self._largest
        self._trial.figure(f"{self._precision}: losses within {largest:.1e} ({what}), {self._figure}")


def _losses(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


def _numbers(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:.1e}" if number else "0" for number in numbers)


def replicated(folder: Path) -> int:
    """How often experts got replicas, by the events of a run."""
    return (folder / "events.jsonl").read_text().count('"replicate"')
