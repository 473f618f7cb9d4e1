"""Recipes: files become command lines, and the table in docs/recipes.md is what Megatron-LM and the balancers say."""

import argparse
from pathlib import Path

import pytest

from tests.support.recipe_files import Recipe, read_recipes
from tests.support.recipes import Verdict, command_line, markdown, verdicts

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "docs/recipes.md"
RECIPES = REPOSITORY / "benchmarks/recipes/moe_recipes.json"
HYBRID = REPOSITORY / "benchmarks/recipes/hybrid.json"


def _found(pool, path: Path) -> dict[str, list[Verdict]]:
    """What a dry run says of the recipes of a file. `--balance all` must accept what Megatron-LM accepts."""
    (found,) = pool.run(1, verdicts, read_recipes(path), ["--balance=all"])
    for name, (alone, *_, everything) in found.items():
        assert everything.refusal == alone.refusal, name
    return {name: answers for name, (*answers, _) in found.items()}


@pytest.mark.exhaustive
def test_the_table_of_the_support_page_is_current(pool):
    """To write it anew: python -m tests.support.recipes benchmarks/recipes/moe_recipes.json"""
    found = _found(pool, RECIPES)
    assert len(found) == 18
    table = markdown(found)
    assert f"{table.rstrip()}\n\n## " in SUPPORT.read_text(), "the table, or what follows it, is of another time"
    later = [name for name, (alone, *_) in found.items() if "does not know" in alone.refusal]
    assert {"deepseek_v4_flash", "deepseek_v4_pro"} <= {name.partition("/")[0] for name in later}
    for name, (_, *balanced) in found.items():
        for verdict in balanced:
            assert verdict.refusal or verdict.idle or verdict.report, name


@pytest.mark.exhaustive
def test_the_table_of_hybrid_recipes_is_current(pool):
    """To write it anew: python -m tests.support.recipes benchmarks/recipes/hybrid.json"""
    found = _found(pool, HYBRID)
    assert f"\n{markdown(found).rstrip()}\n\n## " in SUPPORT.read_text(), "the table is of another time"
    published = {name: verdicts for name, verdicts in found.items() if name.startswith("nvidia/")}
    assert len(published) == 3
    for alone, experts, layers, sequences in published.values():
        assert not any(verdict.refusal for verdict in (alone, experts, layers, sequences)) and not layers.idle


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


def test_a_flag_without_a_value_has_none(parser):
    with pytest.raises(ValueError, match="x: --swiglu is a flag without a value, not 'often'; use true or false"):
        command_line(Recipe("x", {"swiglu": "often"}), parser)
