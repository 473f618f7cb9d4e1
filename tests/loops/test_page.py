"""The page about other loops: its code is run as it is printed there, each block in the framework that it is for."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.loops.test_hooks import OfSwift, train_as_swift
from tests.support.packages_apart import folder, why_missing

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/any_loop.md"
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"\A# |^## ", PAGE.read_text(), flags=re.M)}
FRAMEWORKS = {"Megatron-Bridge": "py", "verl": "bash", "slime": "bash", "ms-swift": "py"}
LINES = 10  # of code that a framework takes


def _blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.M | re.S)


def _run(snippet: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run Python of the page with these names. Returns all names."""
    exec(compile(snippet, PAGE.name, "exec"), given)
    return given


def _variables(command: str, *names: str) -> list[str]:
    """Values of exported variables where a block of Bash calls `python`, and then the arguments of this call."""
    shown = " ".join(f'"${name}"' for name in names)
    program = f"python() {{ printf '%s\\n' {shown} \"$@\"; }}\n{command}"
    done = subprocess.run(["bash", "-ceu", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def _names(balancers: Any) -> list[str]:
    return [type(each).__name__ for each in balancers.run.balancers]


def _plain() -> tuple[int, str]:
    """The blocks of the first section, in the place of the loop of the example. Returns the number of losses, and where
    layers are."""
    import torch
    import torch.distributed as dist

    from examples import plain_loop as example

    torch.set_default_dtype(torch.float32)
    dist.init_process_group()
    example.parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    example.model_parallel_cuda_manual_seed(1)
    model = example.build("Ettt|tttL")
    optimizer = example.get_megatron_optimizer(example.OptimizerConfig(lr=1e-2, min_lr=1e-3, clip_grad=0.0), [model])
    losses: list[Any] = []

    def forward_step(at: Any, model: Any) -> Any:
        output, loss = example.forward_step(at, model)
        losses.append(output)
        return output, loss

    given: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "layer_spec": partial(example.packed_layers, model.config),
        "forward_step": forward_step, "steps": [range(2), range(2, 5)],
        "scheduler": example.OptimizerParamScheduler(
            optimizer, 0.0, 1e-2, 1e-3, 0, 50, "linear", 0.0, 0.0, 50, "constant"
        ),
        "get_forward_backward_func": example.get_forward_backward_func,
    }  # fmt: skip
    for snippet in _blocks("In a loop of your own", "py"):
        _run(snippet.replace("4096", str(example.TOKENS)), given)
    assert _names(given["balancers"]) == ["ExpertBalancer", "SequenceBalancer", "LayerBalancer"]
    given["balancers"].close()
    return len(losses), given["layers"].layout


def test_the_plain_loop_trains(pool):
    assert pool.run(4, _plain) == [(5, "Ettt|tttL")] * 4


def _bridge() -> tuple[list[str], int]:
    """Returns the balancers of the callback, and the number of steps that Bridge's `pretrain` made."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from tests.loops.test_bridge import _config, _in

    class Record:
        steps = 0

        def on_train_step_end(self, context: Any) -> None:
            self.steps += 1

    record, used = Record(), []

    def recorded(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        used.extend(callbacks)
        pretrain(config, forward_step, callbacks=[*callbacks, record])

    _in("float64")
    config = _config(2, "", True)
    config.train.train_iters = 2
    (snippet,) = _blocks("Megatron-Bridge", "py")
    _run(snippet, {"config": config, "forward_step": forward_step, "pretrain": recorded})
    (recipe,) = re.findall(r"examples/bridge_recipe.py (\S+) ", *_blocks("Megatron-Bridge", "bash"))
    module, _, name = recipe.rpartition(".")
    assert callable(getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), name))
    return _names(used[0].balancers), record.steps


def test_megatron_bridge_trains(bridge):
    assert bridge.run(4, _bridge) == [(["ExpertBalancer", "LayerBalancer"], 2)] * 4


def _verl(vendor: str, settings: str) -> tuple[str, Any]:
    """The engine that verl takes, and the choice that the plug-in would give it."""
    os.environ |= {"VERL_ENGINE_VENDOR": vendor, "MEGATRON_BALANCE": settings}
    from verl.workers.engine.base import EngineRegistry

    from megatron.balanced.loops.choice import Choice

    return EngineRegistry.get_engine_cls("language_model", "megatron").__name__, Choice.of_environment()


def test_verl_finds_what_is_exported(bridge):
    from megatron.balanced.loops.verl import VENDOR

    vendor, settings, *command = _variables(*_blocks("verl", "bash"), "VERL_ENGINE_VENDOR", "MEGATRON_BALANCE")
    assert vendor == VENDOR and command[:3] == ["-m", "verl.trainer.main_ppo", "--config-name"]
    if why_missing("verl", "verl") is None:
        ((engine, choice),) = bridge.run(1, _verl, vendor, settings)
        assert engine == "BalancedMegatronEngineWithLMHead"
        assert choice.experts.enabled and choice.experts.replica_slots == 2 and choice.sequences.enabled
        trainer = folder("verl") / "verl/trainer"
        assert (trainer / "main_ppo.py").exists() and (trainer / "config" / command[3]).exists()


def _slime(settings: str, path: str) -> list[str]:
    """The balancers that the hook makes."""
    from types import SimpleNamespace

    import torch

    from tests.support.small_moe import SAMPLES, SEQUENCE, build

    os.environ["MEGATRON_BALANCE"] = settings
    module, _, name = path.rpartition(".")
    hook, model = getattr(importlib.import_module(module), name), build(torch.float32)
    args = SimpleNamespace(seq_length=SEQUENCE, micro_batch_size=SAMPLES, distributed_timeout_minutes=5)
    hook(args, 0, 0, [model], None, None)
    (balancers,) = hook.balancers.values()
    balancers.close()
    return _names(balancers)


def test_slimes_hook_is_where_its_flag_says(pool):
    settings, *command = _variables(*_blocks("slime", "bash"), "MEGATRON_BALANCE")
    path = command[command.index("--custom-megatron-before-train-step-hook-path") + 1]
    assert pool.run(2, _slime, settings, path) == [["ExpertBalancer", "SequenceBalancer"]] * 2


def _swift() -> list[float]:
    """Losses with the callback that the block registers."""
    modules = [ModuleType(name) for name in ("swift", "swift.megatron", "swift.megatron.callbacks")]
    base: Any = ModuleType("swift.megatron.callbacks.base")
    registry: dict[str, type] = {}
    modules[-1].megatron_callbacks_map, base.MegatronCallback = registry, OfSwift  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (*modules, base)}
    (snippet,) = _blocks("ms-swift", "py")
    _run(snippet, {})
    (name,) = re.findall(r"--callbacks (\w+)", snippet)
    assert [*registry] == [name]
    return train_as_swift(registry[name])


def test_ms_swift_trains_with_the_callback_that_is_registered(pool):
    for losses in pool.run(2, _swift):
        assert len(losses) == 4


def test_ten_lines_are_enough():
    for section, language in FRAMEWORKS.items():
        assert len(_blocks(section, language)[0].splitlines()) <= LINES, section
