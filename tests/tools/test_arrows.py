"""Imports inside `megatron.balanced` go one way: from the trainer to the balancers, and from them to what is shared.

    loops  ->  trainer, loop  ->  experts, sequences, layers  ->  observe  ->  cpu  ->  shared, local

No balancer imports another one, and only the trainer imports `megatron.training` and reads a namespace of arguments.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "megatron/balanced"
FLOORS = {
    "loops": 5,
    "trainer": 4, "loop": 4,
    "experts": 3, "sequences": 3, "layers": 3,
    "observe": 2,
    "cpu": 1,
    "shared": 0, "local": 0,
}  # fmt: skip


def _imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from ([f"{node.module}.{alias.name}" for alias in node.names] if node.module else [])


def _wrong() -> set[tuple[str, str]]:
    """The arrows that run up or sideways."""
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        room = name.parts[0].removesuffix(".py")
        for module in _imports(path):
            if room in FLOORS and room != "trainer" and module.startswith("megatron.training"):
                found.add((str(name), "megatron.training"))
            parts = module.split(".")
            if parts[:2] != ["megatron", "balanced"] or len(parts) < 3 or parts[2] == room:
                continue
            if FLOORS[parts[2]] >= FLOORS[room]:
                found.add((str(name), parts[2]))
    return found


def test_imports_go_one_way():
    assert not _wrong()


def test_every_room_has_its_floor():
    assert {path.stem for path in ROOT.iterdir()} - {"__pycache__", "__init__"} == set(FLOORS)


def test_only_the_trainer_reads_arguments():
    readers = {
        str(path.relative_to(ROOT))
        for room in FLOORS.keys() - {"trainer"}
        for path in [*(ROOT / room).rglob("*.py"), ROOT / f"{room}.py"]
        if path.exists() and any(module.split(".")[0] == "argparse" for module in _imports(path))
    }
    assert not readers
