"""The page about other loops: its plain loop trains, and all of its Python can be read and names what there is."""

import ast
import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs/any_loop.md"
SNIPPETS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def _train() -> tuple[int, str]:
    """The page's first two snippets, in the place of the loop of the example. Returns the number of losses, and where
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
    for snippet in SNIPPETS[:2]:
        exec(compile(snippet.replace("4096", str(example.TOKENS)), PAGE.name, "exec"), given)
    assert given["balancers"] and type(given["sequences"]).__name__ == "SequenceBalancer"
    given["balancers"].close()
    return len(losses), given["layers"].layout


def test_the_plain_loop_of_the_page_trains(pool):
    assert pool.run(4, _train) == [(5, "Ettt|tttL")] * 4


def test_python_of_the_page_names_what_there_is():
    assert len(SNIPPETS) >= 3
    for snippet in SNIPPETS:
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("megatron.b", "balancing")):
                tree = ast.parse(Path(_file(node.module)).read_text())
                names = {getattr(each, "name", None) for each in tree.body}
                assert {alias.name for alias in node.names} <= names, node.module


def _file(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return found.origin
