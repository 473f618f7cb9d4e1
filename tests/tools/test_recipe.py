"""Recipes: files become command lines, and the table in docs/support.md is what Megatron-LM and the balancers say."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.recipe_files import Recipe, read_recipes
from tests.support.recipes import BALANCERS, Verdict, command_line, main, markdown, verdicts
from tests.support.training import MOCK_DATA, MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "docs/support.md"
RECIPES = REPOSITORY / "benchmarks/recipes/moe_recipes.json"


def _found(path: Path, *choices: list[str], ranks: int | None = None) -> dict[str, list[Verdict]]:
    return verdicts(read_recipes(path), choices, ranks)


@pytest.mark.exhaustive
def test_the_table_of_the_support_page_is_current(pool):
    """To write it anew: python -m tests.support.recipes benchmarks/recipes/moe_recipes.json --markdown"""
    (found,) = pool.run(1, _found, RECIPES, [], *([balancer] for balancer in BALANCERS))
    assert len(found) == 18
    table = markdown(found, ["Megatron-LM alone", *map("`{}`".format, BALANCERS)])
    assert f"{table.rstrip()}\n\n## " in SUPPORT.read_text(), "the table, or what follows it, is of another time"
    later = [name for name, (alone, *_) in found.items() if "does not know" in alone.refusal]
    assert {"deepseek_v4_flash", "deepseek_v4_pro"} <= {name.partition("/")[0] for name in later}
    for name, (_, *balanced) in found.items():
        for verdict in balanced:
            assert verdict.refusal or verdict.idle or verdict.report, name


# Files.

YAML = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: '32'
ARGS:
  --num-layers: 4
  norm_epsilon: 1e-6
  swiglu: true
  load: ${A_PATH_THAT_IS_NOT_SET}/model
"""


def test_a_yaml_file_of_megatron_is_read(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "bf16_16GPU.yaml"
    path.write_text(YAML)
    (recipe,) = read_recipes(path)
    assert recipe.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert recipe.ranks == 16
    assert recipe.flags["num_layers"] == 4 and float(recipe.flags["norm_epsilon"]) == 1e-6
    arguments, _ = command_line(recipe, argparse.ArgumentParser())
    assert arguments == ["--num-layers=4", "--norm-epsilon=1e-6", "--swiglu"], "a path that is not set is left out"


def test_a_json_file_has_one_recipe_or_several(tmp_path):
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    one.write_text('{"num-layers": 4, "--bf16": true}')
    several.write_text('{"a/8GPU": {"bf16": true}, "b": {"fp16": true}}')
    (recipe,) = read_recipes(one)
    assert recipe.flags == {"num_layers": 4, "bf16": True} and recipe.ranks is None
    assert [(each.name, each.ranks) for each in read_recipes(several)] == [("a/8GPU", 8), ("b", None)]


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--no-overlap-p2p-communication", action="store_false", dest="overlap_p2p_comm")
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--cuda-graph-modules", nargs="+")
    parser.add_argument("--layout")
    parser.add_argument("--offset", type=int)
    return parser


@pytest.mark.parametrize(
    "flags, arguments",
    [
        ({"swiglu": True}, ["--swiglu"]),
        ({"swiglu": "true"}, ["--swiglu"]),
        ({"swiglu": False}, []),
        ({"swiglu": None}, []),
        ({"overlap_p2p_comm": True}, []),
        ({"overlap_p2p_comm": False}, ["--no-overlap-p2p-communication"]),
        ({"no_overlap_p2p_communication": True}, ["--no-overlap-p2p-communication"]),
        ({"recompute_modules": ["mlp", "moe_act"]}, ["--recompute-modules", "mlp", "moe_act"]),
        ({"recompute_modules": "mlp 'moe_act'"}, ["--recompute-modules", "mlp", "moe_act"]),
        ({"layout": "'Et*4|(tt|)*2L'"}, ["--layout=Et*4|(tt|)*2L"]),
        ({"offset": -1}, ["--offset=-1"]),
        ({"cuda_graph_scope": "attn moe_router"}, ["--cuda-graph-modules", "attn", "moe_router"]),
        ({"cuda_graph_scope": "full_iteration", "cuda_graph_impl": "local"}, ["--cuda-graph-impl=full_iteration"]),
        (
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
            ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl=native"],
        ),
        ({"flag_of_another_version": 3}, ["--flag-of-another-version=3"]),
    ],
)
def test_flags_of_a_recipe(parser, flags, arguments):
    assert command_line(Recipe("x", flags), parser)[0] == arguments


# Bad input.


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("absent.json", None, ("absent.json cannot be read", "No such file")),
        ("recipe.toml", "", ("recipe.toml", ".json, .yaml or .yml")),
        ("broken.json", '{"num_layers": ', ("broken.json is not JSON", "line 1")),
        ("list.json", "[1, 2]", ("list.json is not a recipe",)),
        ("empty.json", "{}", ("empty.json is not a recipe",)),
        ("nested.json", '{"num_layers": {"a": 1}, "bf16": true}', ("nested.json", "num_layers is a mapping")),
        ("section.json", '{"ARGS": 3}', ("section.json", "ARGS", "map names to values")),
        ("ranks.json", '{"num_layers": 4}', ("ranks", "set WORLD_SIZE")),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, monkeypatch, capsys, name, content, words):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main([str(tmp_path / name), "--balance-experts"]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out and line.startswith("python -m tests.support.recipes: error: ")
    for word in words:
        assert word in line


def _main(arguments: list[str]) -> tuple[int, str, str]:
    os.environ.pop("WORLD_SIZE")  # the pool's
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(arguments)
    return code, out.getvalue(), error.getvalue()


def _recipe(folder: Path, **more: object) -> str:
    """A recipe for eight ranks that balanced experts accept."""
    words = [word for word in " ".join([*MODEL, *MOCK_DATA]).replace("--device cpu", "").split("--") if word.strip()]
    flags: dict[str, object] = {}
    for word in words:
        name, _, value = word.strip().partition(" ")
        flags[name.replace("-", "_")] = value or True
    flags |= {"global_batch_size": 8, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "swiglu": True}
    flags |= {"disable_bias_linear": True, "expert_model_parallel_size": 8, "moe_token_dispatcher_type": "alltoall"}
    path = folder / "small_8GPU.json"
    path.write_text(json.dumps(flags | more))
    return str(path)


@pytest.mark.parametrize(
    "more, flags, code, words",
    [
        ({}, "--balance-experts", 0, ("plan   --balance-experts: one expert-parallel group of 8 ranks",)),
        ({}, "", 0, ("Megatron-LM alone: accepted", "--balance-experts: accepted", "nothing to balance")),
        ({"use_megatron_fsdp": True}, "--balance-experts", 2, ("refused: ", "--use-megatron-fsdp")),
        ({"mhc_streams": 4}, "--balance-experts", 2, ("does not know mhc_streams",)),
        ({"swiglu": "often"}, "--balance-experts", 2, ("--swiglu is a flag without a value, not 'often'",)),
        ({"num_layers": "many"}, "--balance-experts", 2, ("--num-layers", "many")),
        ({}, "--balance-expert", 2, ("unknown flag --balance-expert; did you mean --balance-experts?",)),
        ({}, "--balance-experts --expert-replica-slots -1", 2, ("--expert-replica-slots -1",)),
    ],
)
def test_answers(pool, tmp_path, more, flags, code, words):
    ((answered, out, error),) = pool.run(1, _main, [_recipe(tmp_path, **more), *flags.split()])
    assert answered == code, (out, error)
    for word in words:
        assert word in out + error
    assert "Traceback" not in out + error


def test_the_command_answers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.recipes", str(tmp_path / "absent.yaml"), "--balance-experts"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("python -m tests.support.recipes: error: ") and len(done.stderr.splitlines()) == 1
