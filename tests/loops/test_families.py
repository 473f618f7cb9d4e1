"""A recipe of each family in Megatron-Bridge's performance recipes, shrunk, with every balancer equals its plain run.

docs/recipes.md has the table: `tests.support.bridge_recipes` writes it, and tells the recipes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.test_functional import SINGLE_TOLERANCE, TOLERANCE, train_small
from tests.support.bridge_recipes import families
from tests.support.families import CANNOT_TRAIN, Chosen, small_of
from tests.support.packages_apart import why_missing
from tests.support.patience import PATIENCE
from tests.support.sampled import sampled
from tests.support.shrink import for_cpu
from tests.support.training import MOCK_DATA, differences

READ = "import sys; from tests.support.bridge_recipes import write_chosen; write_chosen(sys.argv[1])"
FAMILIES = [family for family in families() if family not in CANNOT_TRAIN]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory) -> dict[str, Chosen]:
    """Family -> its recipe, read in a process of its own: where Megatron-LM finds Bridge, and GPUs are assumed."""
    for name, title in (("transformer_engine", "Transformer Engine"), ("megatron_bridge", "Megatron-Bridge")):
        if why := why_missing(name, title):
            pytest.skip(why)
    path = tmp_path_factory.mktemp("families") / "chosen.json"
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {family: Chosen(**fields) for family, fields in json.loads(Path(path).read_text()).items()}


@pytest.mark.parametrize("family", sampled(FAMILIES, "DeepSeek-V3", "GLM-5", "GPT-OSS", "Qwen3.5-VL"))
def test_balanced_equals_unbalanced(request, pool, chosen, family):
    recipe = chosen[family]
    small = small_of(recipe)
    with_engine = small.needs_transformer_engine
    workers = request.getfixturevalue("engine") if with_engine else pool
    of_losses, of_parameters = SINGLE_TOLERANCE if with_engine else (TOLERANCE, TOLERANCE)
    small = for_cpu(small, spreads=False)
    reference = train_small(workers, small, (), MOCK_DATA)
    for balancers in dict.fromkeys([*((each,) for each in recipe.balancers), tuple(recipe.balancers)]):
        losses, parameters = differences(train_small(workers, small, balancers, MOCK_DATA), reference)
        assert losses <= of_losses, balancers
        assert parameters <= of_parameters, balancers


@pytest.mark.parametrize("family", CANNOT_TRAIN)
def test_megatron_cannot_build_the_others(chosen, family):
    from typing import get_args, get_type_hints

    from megatron.core.transformer.transformer_config import TransformerConfig

    kinds = get_type_hints(TransformerConfig)["experimental_attention_variant"]
    known = {name for kind in get_args(kinds) for name in get_args(kind)}
    assert "dsa" in known and chosen[family].flags["experimental_attention_variant"] not in known
