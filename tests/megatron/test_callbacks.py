"""A user's own callback is called for everything that happens in a run, and may communicate in each call."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.moving import Plans, move_at
from tests.support.training import EXACT, MOCK_DATA, MODEL, train_rank

STEP = ["begin_schedule", "end_schedule", "end_step"]


def _recorder(calls: list[str]) -> Any:
    """A callback that notes its calls, each with what tells it from others, and meets all other ranks in each."""
    import torch.distributed as dist

    from megatron.balanced.shared import callbacks

    def of(name: str, *args: Any) -> str:
        if name == "attach":
            (chunks,) = args
            return f"attach {sum(len(chunk.module.decoder.layers) for chunk in chunks)}"
        if name == "begin_step":
            iteration, config = args
            assert recorder.run.chunks[0].module.config is config and recorder.run.optimizer is not None
            return f"begin_step {iteration}"
        if name == "layer_arrived":
            layer, chunk = args
            assert all(parameter.main_grad is not None for parameter in layer.parameters())
            return f"layer_arrived {layer.layer_number} in {chunk}"
        return name

    class Recorder(callbacks.StepCallback):
        pass

    for name in [name for name, method in vars(callbacks.StepCallback).items() if callable(method)]:
        if name.startswith("_"):
            continue

        def note(self: Any, *args: Any, name: str = name) -> None:
            calls.append(of(name, *args))
            if not name.endswith("_arrived"):  # on some of the ranks
                dist.barrier()

        setattr(Recorder, name, note)
    recorder = Recorder()
    return recorder


def _rank(argv: list[str], plans: Plans) -> tuple[list[str], bool]:
    """Train with a callback. Returns its calls, and whether this rank left the job."""
    from megatron.balanced.trainer.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.balanced.trainer.train import train

    calls: list[str] = []
    if plans:
        move_at(plans)
    left = False
    try:
        train(args, config, callbacks=[_recorder(calls)])
    except SystemExit as released:
        assert released.code == 0
        left = True
    return calls, left


def test_a_callback_sees_layers_move_and_ranks_leave(pool):
    flags = "--pipeline-model-parallel-size 2 --balance-layers --repack-throughput-floor 0.5"
    argv = [*MODEL, *MOCK_DATA, *EXACT, *flags.split()]
    (stays, _), (leaves, left) = pool.run(2, _rank, argv, {1: ((3,), (1,)), 2: ((4,),)})
    first = ["attach 2", "begin_step 0", *STEP]
    assert stays == [
        *first,
        *["layer_arrived 3 in 0", "layers_moved", "begin_step 1", *STEP],
        *["flush", "layer_arrived 4 in 0", "head_arrived", "layers_moved", "begin_step 2", *STEP],
        *["begin_step 3", *STEP, "end_training"],
    ]
    assert left and leaves == [*first, "layers_moved", "begin_step 1", *STEP, "flush"]


@pytest.mark.parametrize("flags, steps", [("", 4), ("--exit-interval 2", 2)])
def test_a_callback_needs_no_feature(pool, flags, steps):
    ((calls, left),) = pool.run(1, _rank, [*MODEL, *MOCK_DATA, *flags.split()], {})
    assert calls == ["attach 4", *[call for i in range(steps) for call in (f"begin_step {i}", *STEP)], "end_training"]
    assert left == bool(flags), "Megatron-LM ends an early exit with SystemExit"


def test_a_run_that_is_complete_has_no_step(pool, tmp_path):
    flags = f"--pipeline-model-parallel-size 2 --balance-layers --train-iters 1 --save {tmp_path} --save-interval 1"
    argv = [*MODEL, *MOCK_DATA, *EXACT, *flags.split()]
    pool.run(2, _rank, argv, {})
    assert pool.run(2, _rank, [*argv, "--load", str(tmp_path)], {}) == [(["attach 2", "end_training"], False)] * 2


def _fails(argv: list[str]) -> None:
    from megatron.balanced.shared.callbacks import StepCallback

    class Fails(StepCallback):
        def end_schedule(self) -> None:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train_rank(argv, False, callbacks=[Fails()])


def test_an_error_in_a_callback_ends_the_run(pool):
    pool.run(1, _fails, [*MODEL, *MOCK_DATA])


def _run(script: str, argv: list[str]) -> None:
    sys.argv[1:] = argv
    exec(compile(script, "docs/overlay.md", "exec"), {})


def test_the_documented_script_runs(pool):
    page = Path(__file__).resolve().parents[2] / "docs" / "overlay.md"
    (script,) = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.M | re.S)
    pool.run(1, _run, script, [*MODEL, *MOCK_DATA])
    assert re.findall(r"^(\d) 0\.00\d+$", pool.output[0], re.M) == list("0123")
