"""A model of a user's own: its flags, its modules, its callbacks, and that its layers move and freeze like others."""

import argparse
import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.events import events_in
from tests.support.moving import Plans, move_at
from tests.support.training import EXACT, MOCK_DATA, MODEL, RankRun, join, watch

PP2 = "--pipeline-model-parallel-size 2"


def _own_model() -> Any:
    """Its first layers are frozen from the start, and every second layer has a gain and counts its passes."""
    from megatron.balanced.trainer.model_extension import ModelExtension

    class Own(ModelExtension):
        def add_flags(self, parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--frozen-front", type=int, default=0)

        def check(self, args: argparse.Namespace) -> None:
            if args.frozen_front >= args.num_layers:
                raise ValueError(f"--frozen-front {args.frozen_front} leaves none to train; use less")

        def modules(self, args: argparse.Namespace) -> Mapping[type, type]:
            import torch
            from megatron.core.transformer.transformer_layer import TransformerLayer

            class Layer(TransformerLayer):
                def __init__(self, *given: Any, **more: Any) -> None:
                    super().__init__(*given, **more)
                    if self.layer_number % 2 == 0:
                        self.gain = torch.nn.Parameter(torch.ones(1, dtype=self.config.params_dtype))
                        self.register_buffer("passes", torch.zeros(1), persistent=False)
                    if self.layer_number <= args.frozen_front:
                        self.requires_grad_(False)

                def forward(self, hidden_states: torch.Tensor, *given: Any, **more: Any) -> Any:
                    output, context = super().forward(hidden_states, *given, **more)
                    if self.layer_number % 2 == 0:
                        self.passes += 1
                        output = output * self.gain
                    return output, context

            return {TransformerLayer: Layer}

        def layers_differ(self, args: argparse.Namespace) -> bool:
            return True

        def callbacks(self, args: argparse.Namespace) -> list[Any]:
            return [_counts()]

        def frozen_layers(self, args: argparse.Namespace) -> int | None:
            return args.frozen_front

    return Own()


def _counts() -> Any:
    """Reports the passes and the frozen layers of this rank at the end of each step."""
    from megatron.core.utils import unwrap_model

    from balancing.report import event
    from megatron.balanced.shared.callbacks import StepCallback

    class Counts(StepCallback):
        def attach(self, chunks: list[Any]) -> None:
            self.chunks, self.iteration = chunks, 0

        def begin_step(self, iteration: int, config: Any) -> None:
            self.iteration = iteration

        def end_step(self) -> None:
            layers = [layer for model in unwrap_model(self.chunks) for layer in model.decoder.layers]
            passes = {layer.layer_number: int(layer.passes) for layer in layers if hasattr(layer, "passes")}
            frozen = [layer.layer_number for layer in layers if not any(p.requires_grad for p in layer.parameters())]
            self.report(event(self.iteration + 1, "mine", "layer", imbalance_before=1.0, passes=passes, frozen=frozen))

    return Counts()


def _rank(argv: list[str], plans: Plans) -> RankRun:
    """Train until the end, or until this rank is released."""
    from megatron.balanced.trainer.arguments import parse_arguments

    model = _own_model()
    args, config = parse_arguments(argv, model)

    from megatron.balanced.trainer.train import train

    if plans:
        move_at(plans)
    finish = watch(False)
    with contextlib.suppress(SystemExit):
        train(args, config, extension=model)
    return finish()


def test_layers_of_ones_own_move_freeze_and_stay_when_ranks_leave(pool, tmp_path):
    base = [*MODEL, *MOCK_DATA, *EXACT, *"--init-method-std 0.1 --frozen-front 2 --train-iters 5".split()]
    base += f"{PP2} --balance-layers --repack-throughput-floor 0.5".split()
    still = join(pool.run(2, _rank, base, {}))
    stays, left = pool.run(
        2, _rank, [*base, "--balance-report", str(tmp_path)], {1: ((1,), (3,)), 2: ((3,), (1,)), 4: ((4,),)}
    )
    moved = left.losses + stays.losses
    assert len(left.losses) == 4
    np.testing.assert_allclose(moved, still.losses, rtol=1e-12)
    assert len(set(moved)) == 5, "nothing was trained"
    mine = events_in(tmp_path, balancer="mine")
    for iteration in range(1, 6):
        told = [event for event in mine if event["iteration"] == iteration]
        passes = {number: count for event in told for number, count in event["passes"].items()}
        assert passes == {"2": 4 * iteration, "4": 4 * iteration}, "a buffer did not move with its layer"
        assert sorted(number for event in told for number in event["frozen"]) == [1, 2]


def _refused(argv: list[str], extended: bool) -> tuple[object, str]:
    from megatron.balanced.trainer.arguments import parse_arguments

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parse_arguments(argv, _own_model() if extended else None)
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return "none", said.getvalue()


@pytest.mark.parametrize("extended, words", [(True, "--frozen-front 4 leaves none"), (False, "unrecognized arguments")])
def test_a_flag_of_ones_own_is_refused_in_one_line(pool, extended, words):
    ((code, said),) = pool.run(1, _refused, [*MODEL, *MOCK_DATA, "--frozen-front", "4"], extended)
    (line,) = [line for line in said.splitlines() if "error:" in line or "Traceback" in line]
    assert code == 2 and words in line
