"""Imports go one way, in all packages and between them.

    megatron.balanced:  loops  ->  trainer, loop  ->  experts, sequences, layers, fill, trials  ->  observe
                        ->  cpu, run  ->  shared
    balancing_tools:    whatif, experts, layers, report, cluster, doctor  ->  load_trace, recorded_run
    balancing:          experts, sequences, layers  ->  kernels  ->  pipeline, cluster, report  ->  files

No balancer imports another one, in neither package. Only the trainer imports `megatron.training` and reads a namespace
of arguments. `balancing` imports nothing of Megatron. Tools import `balancing` alone, by its public names, and are
imported by the files that start them.
"""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BALANCERS = {"experts", "sequences", "layers"}
FLOORS = {
    "megatron.balanced": {
        "loops": 5,
        "trainer": 4, "loop": 4,
        "experts": 3, "sequences": 3, "layers": 3, "fill": 3, "trials": 3,
        "observe": 2,
        "cpu": 1, "run": 1,
        "shared": 0, "local": 0,
    },
    "balancing_tools": {
        "cluster": 1, "doctor": 1, "experts": 1, "layers": 1, "report": 1, "whatif": 1,
        "load_trace": 0, "recorded_run": 0,
    },
    "balancing": {
        "whatif": 5,  # starts the command
        "experts": 4, "sequences": 4, "layers": 4,
        "kernels": 3,
        "cluster": 2, "doctor": 2, "pipeline": 2, "report": 2, "run_lock": 2,
        "files": 1, "messages": 1, "trials": 1, "worker": 1,
        "clock": 0, "command_line": 0, "launch": 0, "model_sizes": 0, "process": 0, "ranges": 0, "settings": 0,
        "threads": 0, "upload": 0,
    },
}  # fmt: skip


# Commands, the page at the end of a report, and the forecast of a dry run: inside a function or a program, so that an
# import of these packages never loads a tool.
STARTS_A_TOOL = {
    *(f"balancing/{name}/__main__.py" for name in ("cluster", "doctor", "experts", "layers", "report")),
    "balancing/whatif.py",
    "megatron/balanced/trainer/dry_run.py",
}


def _imports(path: Path) -> Iterator[str]:
    """The modules and names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(module: str) -> tuple[str, str] | None:
    """(package, room) of a module or of a name in one; None outside of both packages."""
    for package in FLOORS:
        if module.startswith(f"{package}."):
            return package, module.removeprefix(f"{package}.").split(".")[0]
    return None


@cache
def _arrows() -> list[tuple[str, tuple[str, str], str]]:
    """(file, its room, what it imports) of each import in a room."""
    found = []
    for package in FLOORS:
        for path in sorted((REPOSITORY / package.replace(".", "/")).rglob("*.py")):
            name = path.relative_to(REPOSITORY)
            room = _room(".".join(name.with_suffix("").parts))
            if room is not None and not room[1].startswith("__"):
                found += [(str(name), room, module) for module in _imports(path)]
    return found


def test_imports_go_one_way():
    wrong = set()
    for file, (package, room), module in _arrows():
        other = _room(module)
        if other is not None and other[0] == package and other[1] != room:
            floors = FLOORS[package]
            if other[1] in floors and floors[other[1]] >= floors[room]:
                wrong.add((file, module))
    assert not wrong


def test_no_files_import_in_a_circle():
    """Also where an import waits inside a function."""
    paths = {path for package in FLOORS for path in (REPOSITORY / package.replace(".", "/")).rglob("*.py")}
    files = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
             for path in paths}  # fmt: skip
    names = {name: {part for each in _imports(path) for part in (each, each.rpartition(".")[0])}
             for name, path in files.items()}  # fmt: skip
    TopologicalSorter({name: (found & files.keys()) - {name} for name, found in names.items()}).prepare()


def test_no_balancer_imports_another():
    pairs = {(room, other[1], file) for file, (_, room), module in _arrows() if (other := _room(module))}
    assert not {pair for pair in pairs if {*pair[:2]} <= BALANCERS and pair[0] != pair[1]}


def test_every_room_has_its_floor():
    for package, floors in FLOORS.items():
        rooms = {path.stem for path in (REPOSITORY / package.replace(".", "/")).iterdir() if path.suffix in ("", ".py")}
        assert {room for room in rooms if not room.startswith("__")} == set(floors)


def test_every_balancer_is_defined_once():
    """All loops have the same class."""
    names = ["ExpertBalancer", "SequenceBalancer", "LayerBalancer"]
    trees = [ast.parse(path.read_text()) for path in REPOSITORY.glob("megatron/**/*.py")]
    defined = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(name for name in defined if name in names) == sorted(names)


def test_only_the_trainer_reads_arguments_and_megatrons_training():
    for file, (package, room), module in _arrows():
        if (package, room) != ("megatron.balanced", "trainer"):
            assert not module.startswith("megatron.training"), file
            if package == "megatron.balanced":
                assert module.split(".")[0] != "argparse", file


def test_planners_and_tools_know_nothing_of_megatron():
    others = {"megatron", "benchmarks", "examples", "tests"}
    assert not {file for file, (package, _), module in _arrows()
                if package.startswith("balancing") and module.split(".")[0] in others}  # fmt: skip


def test_tools_are_imported_where_they_are_started():
    ours = {path for package in FLOORS if package != "balancing_tools"
            for path in (REPOSITORY / package.replace(".", "/")).rglob("*.py")}  # fmt: skip
    found = {str(path.relative_to(REPOSITORY)) for path in ours if any(map(_is_tool, _imports(path)))}
    assert found == STARTS_A_TOOL
    for file in found:
        at_import = ast.parse((REPOSITORY / file).read_text()).body
        assert not {node.module for node in at_import if isinstance(node, ast.ImportFrom) and _is_tool(node.module)}


def _is_tool(module: str | None) -> bool:
    return (module or "").split(".")[0] == "balancing_tools"


def test_tools_import_public_names():
    """Those of `__all__`."""
    private = set()
    for path in (REPOSITORY / "balancing_tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "balancing":
                module = importlib.import_module(str(node.module))
                public = {*getattr(module, "__all__", ()), "__version__"}
                private |= {(path.name, node.module, alias.name) for alias in node.names if alias.name not in public}
    assert not private
