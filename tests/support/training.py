"""Train on the pool's ranks as the program of a command line would, and keep what two runs are compared by.

Losses are kept as the training step returns them, in full precision. Parameters are put together from all ranks under
the names a checkpoint has for them, which do not depend on the layout, so that runs of different layouts can be
compared tensor by tensor.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.program import parse
from tests.support.weights import ADAM_EPS

# A model small enough for a CPU, with every kind of parameter: tied embeddings, biases, norms.
MODEL = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    f"--adam-eps {ADAM_EPS} "  # `weights.py` says why
    "--eval-interval 1000 --eval-iters 0 --log-interval 1 --num-workers 0 --distributed-timeout-minutes 5"
).split()
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127".split()
# Nothing in Megatron is rounded to float32 then, but the norm that clipping divides by.
EXACT = "--fp64 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0".split()
MOE = "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48".split()


@dataclass(frozen=True)
class Piece:
    """A rank's part of one tensor, NaN where others have it, and where it lies in the whole."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: np.ndarray


@dataclass
class RankRun:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)  # only on the last pipeline stage
    grad_norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    replicas: int | None = None  # of its layers, over all iterations; None without a balancer of experts


@dataclass(frozen=True)
class Run:
    """A whole run: the loss of each iteration and, if asked for, the final parameters by name; and the replicas that
    experts had, None without a balancer of experts."""

    losses: list[float]
    grad_norms: list[float]
    validation: list[float]
    parameters: dict[str, np.ndarray]
    replicas: int | None = None


def _pieces(model: list[Any]) -> dict[str, list[Piece]]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.utils import unwrap_model

    pieces: dict[str, list[Piece]] = {}

    def collect(node: Any) -> None:
        if isinstance(node, ShardedTensor):
            if not node.key.endswith("_extra_state"):
                plain = node.data.dequantize() if hasattr(node.data, "get_metadata") else node.data
                values = plain.detach().double().numpy().copy()
                values = values.reshape((1,) * node.prepend_axis_num + values.shape)
                whole = tuple(node.global_shape), tuple(node.global_offset)
                pieces.setdefault(node.key, []).append(Piece(*whole, values))
        elif isinstance(node, dict):
            for value in node.values():
                collect(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                collect(value)

    for chunk in model:
        state = unwrap_model(chunk).sharded_state_dict()
        apply_factories(state)
        collect(state)
    return pieces


def _moments(model: list[Any], optimizer: Any) -> dict[str, list[Piece]]:
    """Pieces of each moment, named "parameter:moment". NaN where another rank's optimizer has it.

    The moments take the places of the parameters for a while, so that both get the same names and are cut alike.
    """
    import torch

    from megatron.balanced.shared.optimizer_state import states_of

    states = states_of(optimizer)
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    pieces: dict[str, list[Piece]] = {}
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for kind in ("exp_avg", "exp_avg_sq"):
            for parameter in parameters:
                parameter.fill_(torch.nan)
                if (state := states.get(parameter)) is not None:
                    parameter.view(-1)[state.start : state.stop] = state.tensors[kind].to(parameter.dtype)
            pieces |= {f"{name}:{kind}": parts for name, parts in _pieces(model).items()}
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.copy_(values)
    return pieces


def train_rank(
    argv: list[str], keep_parameters: bool, keep_moments: bool = False, callbacks: Sequence[Any] = ()
) -> RankRun:
    """The body of one rank. Runs in a process of its own, so what it replaces in Megatron needs no undoing."""
    args, config, train = parse(argv)
    finish = watch(keep_parameters, keep_moments)
    train(args, config, callbacks)
    return finish()


def watch(keep_parameters: bool, keep_moments: bool = False) -> Callable[[], RankRun]:
    """Record what Megatron's training loop returns from now on. Returns what gives the record at the end."""
    from megatron.training import training

    from megatron.balanced.experts.balancer import ExpertBalancer

    run = RankRun()
    models: list[Any] = []
    optimizers: list[Any] = []
    build, step, evaluate = training.setup_model_and_optimizer, training.train_step, training.evaluate
    end = ExpertBalancer.end_step

    @functools.wraps(end)
    def end_step(balancer: ExpertBalancer) -> None:
        for chunk in balancer._chunk_at.values():
            late = [] if chunk.late is None else chunk.late.copies
            run.replicas = sum(late, (run.replicas or 0) + sum(layer.placement.replicas for layer in chunk.layers))
        end(balancer)

    @functools.wraps(build)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        models.append(built[0])
        optimizers.append(built[1])
        return built

    @functools.wraps(step)  # its signature is checked before it is patched
    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if "lm loss" in result[0]:
            run.losses.append(result[0]["lm loss"].item())
        run.grad_norms.append(result[5])
        return result

    @functools.wraps(evaluate)
    def evaluate_(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            run.validation.append(float(result[0]["lm loss"]))
        return result

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.train_step = train_step
    training.evaluate = evaluate_
    ExpertBalancer.end_step = end_step

    def finish() -> RankRun:
        if keep_parameters:
            run.pieces = _pieces(models[0])
        if keep_moments:
            run.pieces |= _moments(models[0], optimizers[0])
        return run

    return finish


def _assemble(name: str, pieces: list[Piece]) -> np.ndarray:
    """The whole tensor. Raises AssertionError when a part is missing or replicas differ."""
    whole = np.full(pieces[0].shape, np.nan)
    for piece in pieces:
        where = tuple(slice(start, start + n) for start, n in zip(piece.offset, piece.values.shape, strict=True))
        seen = ~np.isnan(whole[where]) & ~np.isnan(piece.values)
        assert np.array_equal(whole[where][seen], piece.values[seen]), f"replicas of {name} differ"
        whole[where] = np.where(np.isnan(piece.values), whole[where], piece.values)
    assert not np.isnan(whole).any(), f"a part of {name} is on no rank"
    return whole


def join(ranks: list[RankRun]) -> Run:
    """Put together what the ranks of one run saw. Ranks that saw the same thing must agree bit for bit."""
    pieces: dict[str, list[Piece]] = {}
    for rank in ranks:
        for name, parts in rank.pieces.items():
            pieces.setdefault(name, []).extend(parts)

    def agreed(seen: list[list[float]]) -> list[float]:
        told = [values for values in seen if values]
        assert all(values == told[0] for values in told), f"ranks disagree: {told}"
        return told[0] if told else []

    return Run(
        losses=agreed([rank.losses for rank in ranks]),
        grad_norms=agreed([rank.grad_norms for rank in ranks]),
        validation=agreed([rank.validation for rank in ranks]),
        parameters={name: _assemble(name, parts) for name, parts in pieces.items()},
        replicas=sum(counts) if (counts := [rank.replicas for rank in ranks if rank.replicas is not None]) else None,
    )


def train(
    pool: Any, world_size: int, flags: str = "", *, base: list[str] | None = None, parameters: bool = False
) -> Run:
    """Train on `world_size` ranks of the pool. `base` replaces the model and the mock data."""
    argv = [*(MODEL + MOCK_DATA if base is None else base), *flags.split()]
    return join(pool.run(world_size, train_rank, argv, parameters))


def differences(run: Run, reference: Run) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a parameter tensor in norm. A balancer of experts must have
    made replicas, as the run without one is what it is compared with."""
    assert 0 not in (run.replicas, reference.replicas), "no expert had a replica"
    assert len(run.losses) == len(reference.losses) > 0
    assert run.parameters.keys() == reference.parameters.keys()
    losses = max(_difference(*map(np.asarray, pair)) for pair in zip(run.losses, reference.losses, strict=True))
    tensors = [_difference(run.parameters[name], whole) for name, whole in reference.parameters.items()]
    return losses, max(tensors, default=0.0)


def _difference(one: np.ndarray, whole: np.ndarray) -> float:
    """In norm, relative to `whole`; of a `whole` of zeros absolute. Infinite where either is not finite."""
    difference = float(np.linalg.norm(one - whole) / (np.linalg.norm(whole) or 1.0))
    return difference if np.isfinite(difference) else np.inf


def assert_close(run: Run, reference: Run, tolerance: float = 1e-12) -> None:
    """Equal but for rounding: losses relative, each parameter in norm."""
    losses, parameters = differences(run, reference)
    assert losses <= tolerance
    assert parameters <= tolerance


def assert_same(run: Run, reference: Run) -> None:
    """Bit for bit: losses, gradient norms and parameters."""
    assert run.losses == reference.losses
    assert run.grad_norms == reference.grad_norms
    assert run.parameters.keys() == reference.parameters.keys()
    for name, whole in reference.parameters.items():
        assert np.array_equal(run.parameters[name], whole), name
