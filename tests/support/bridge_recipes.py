"""Whether the balancers accept the performance recipes of Megatron-Bridge, as the tables of docs/recipes.md say.

    python -m tests.support.bridge_recipes

Every recipe with experts that the pinned wheel has is made, and its config read as the flags of `pretrain_gpt.py` of
the same names. The trainer's own checks of these flags decide. What recipes read from Hugging Face's hub, the config
of the model, comes from the defaults of transformers and `_MODELS`.
"""

import argparse
import copy
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.families import CANNOT_TRAIN, CHANGED, Chosen, changes
from tests.support.limits import DOCS
from tests.support.packages_apart import version

__all__ = ["BEGIN", "END", "PAGE", "families", "markdown", "write_chosen", "written"]

PAGE = DOCS / "recipes.md"
BEGIN = "<!-- python -m tests.support.bridge_recipes writes what follows -->\n"
END = "<!-- it wrote what precedes -->\n"
_ROOT = "megatron.bridge.perf_recipes"
# Package -> the families of models in it: title -> pattern of the names of its recipes.
_FAMILIES: dict[str, dict[str, str]] = {
    "deepseek": {"DeepSeek-V3": "deepseek_v3", "DeepSeek-V4": "deepseek_v4"},
    "glm_moe_dsa": {"GLM-5": "glm"},
    "gpt_oss": {"GPT-OSS": "gpt_oss"},
    "kimi": {"Kimi-K2": "kimi"},
    "nemotronh": {"Nemotron-3": "nemotron"},
    "qwen": {"Qwen3-Next": "qwen3_next", "Qwen3": "qwen3"},
    "qwen_vl": {"Qwen3-VL": "qwen3_vl", "Qwen3.5-VL": "qwen35_vl"},
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 65536}
_NEMOTRON = {"hybrid_override_pattern": "MEM*EMEM" * 11, "n_routed_experts": 512}
# Model on the hub -> its type, the class of the model, and what differs from the defaults of transformers' config.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    "DeepSeek-V4": ("deepseek_v4", "DeepseekV4ForCausalLM", {"rope_parameters": {"main": _YARN, "compress": _YARN}}),
    "GLM-5": ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {"indexer_rope_interleave": True}),
    "gpt-oss-120b": ("gpt_oss", "GptOssForCausalLM", {}),
    "gpt-oss-20b": ("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "Kimi-K2": ("deepseek_v3", "DeepseekV3ForCausalLM", {"n_routed_experts": 384}),
    "Nemotron-3": ("nemotron_h", "NemotronHForCausalLM", _NEMOTRON),
    "Qwen3-235B": ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 94}),
    "Qwen3-30B": ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 48}),
    "Qwen3-Next": ("qwen3_next", "Qwen3NextForCausalLM", {}),
    "Qwen3-VL": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {"text_config": {"num_experts": 128}}),
    "Qwen3.5": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", {}),
}
# Fields of Bridge's configs whose flags `pretrain_gpt.py` stores under other names.
_NAMES = {
    "cuda_graph_scope": "cuda_graph_scope_deprecated",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
BALANCERS = ("experts", "layers", "sequences")
REPORT = "report"
_FLAGS = {of: f"`--balance-{of}`" for of in (*BALANCERS, REPORT)}


@dataclass(frozen=True)
class Found:
    """A recipe, and what the checks say of it.

    said: balancer, or "report" -> whether it is refused, and the lines: flags that refuse it with the reason, or notes.
    Without those that have nothing to balance. flags: as in a recipe file.
    """

    name: str
    family: str
    number_format: str
    said: Mapping[str, tuple[bool, tuple[str, ...]]]
    flags: Mapping[str, Any]

    @property
    def accepted(self) -> tuple[str, ...]:
        """The balancers that apply and accept it."""
        return tuple(of for of in BALANCERS if of in self.said and not self.said[of][0])


# Recipes as flags.


def _from_hub(cls: Any, path: str, **_: Any) -> Any:
    """In the place of `AutoBridge.from_hf_pretrained`: without a network."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, architecture, changes = next(model for name, model in _MODELS.items() if name in str(path))
    config = CONFIG_MAPPING[kind](**changes)
    config.architectures = [architecture]
    return cls.from_hf_config(config)


def _made() -> tuple[dict[tuple[str, str], Any], dict[str, str]]:
    """(Package, name) of a recipe -> its config; and name -> why it cannot be made."""
    from megatron.bridge import AutoBridge

    AutoBridge.from_hf_pretrained = classmethod(_from_hub)
    configs, failed = {}, {}
    for package in _FAMILIES:
        root = importlib.import_module(f"{_ROOT}.{package}")
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            module = importlib.import_module(found.name)
            for name, make in inspect.getmembers(module, inspect.isfunction):
                if make.__module__ != module.__name__ or not re.fullmatch(r"[a-z].*_\d+gpu_.*_config", name):
                    continue
                try:
                    config = make()
                except FileNotFoundError as error:
                    failed[name] = f"the wheel lacks {str(error.filename).rpartition('/')[2]}"
                    continue
                if config.model.num_moe_experts:
                    configs[package, name.removesuffix("_config")] = config
    return configs, failed


def ranks_of(name: str) -> int:
    """The ranks of a recipe, which its name tells."""
    return int(re.findall(r"(\d+)gpu", name)[0])


def _plain(name: str, value: Any) -> Any:
    """The value of a field as the command line would store it."""
    if name in ("cuda_graph_modules", "cuda_graph_scope_deprecated"):
        given = value.split(",") if isinstance(value, str) else value or []
        return [module for module in given if module != "full"]
    if name == "pipeline_model_parallel_layout" and isinstance(value, list):
        return "|".join("".join(_LETTERS[layer] for layer in stage) for stage in value)
    return _DTYPES.get(str(value).removeprefix("torch."), value)


def _flags(config: Any, name: str, defaults: argparse.Namespace) -> argparse.Namespace:
    """The config of a recipe as arguments of `pretrain_gpt.py`."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    from megatron.balanced.trainer.checks.model import settle_graphs

    args = copy.copy(defaults)
    precision = config.mixed_precision
    precision = get_mixed_precision_config(precision) if isinstance(precision, str) else precision
    fields: dict[str, Any] = {}
    parts = ("dataset", "checkpoint", "rng", "dist", "train", "model", "optimizer", "ddp")
    for part in (*(getattr(config, part) for part in parts), precision):
        fields |= vars(part)
    if config.comm_overlap is not None:
        fields |= {name: value for name, value in vars(config.comm_overlap).items() if value is not None}
    for field, value in fields.items():
        flag = _NAMES.get(field, field)
        if hasattr(args, flag):
            setattr(args, flag, _plain(flag, value))
    args.world_size = ranks_of(name)
    args.sft = "_sft_" in name or "_lora_" in name
    args.gtp_weight_remat_size = 1
    settle_graphs(args)
    activation = getattr(config.model.activation_func, "__name__", "")
    gated = config.model.gated_linear_unit
    args.swiglu, args.quick_geglu = gated and activation == "silu", gated and activation == "quick_gelu"
    args.squared_relu = activation == "squared_relu"
    args.untie_embeddings_and_output_weights = not config.model.share_embeddings_and_output_weights
    return args


def _as_recipe(args: argparse.Namespace, defaults: argparse.Namespace, parser: argparse.ArgumentParser) -> dict:
    """The flags with which a command line would give `args`, as in a recipe file. What has no flag is left out."""
    flags: dict[str, Any] = {}
    for field, value in vars(args).items():
        actions = [action for action in parser._actions if action.dest == field and action.option_strings]
        if value is None or value == [] or not actions or value == getattr(defaults, field):
            continue
        fits = [action for action in actions if (action.nargs == 0) == isinstance(value, bool)]
        fits = [action for action in fits if not isinstance(value, bool) or action.const is value]
        if fits:
            name = max(fits[0].option_strings, key=len).removeprefix("--").replace("-", "_")
            if name == "cuda_graph_modules":
                value = [module.name for module in value]
            if fits[0].type is int and isinstance(value, float):
                value = int(value)
            if isinstance(value, list | tuple) and fits[0].nargs is None:
                value = ",".join(map(str, value)) if name == "window_size" else str(list(value))
            flags[name] = True if value is False else value
    return flags


# What the checks say.


def _said(args: argparse.Namespace) -> dict[str, tuple[bool, tuple[str, ...]]]:
    """As `Found.said`."""
    from megatron.balanced.shared import incompatible
    from megatron.balanced.trainer.balancers import check_balancers
    from megatron.balanced.trainer.checks.report import notes_on_report
    from megatron.balanced.trainer.config import BalanceConfig

    said: dict[str, tuple[bool, tuple[str, ...]]] = {}
    for of in BALANCERS:
        own = copy.copy(args)
        try:
            setattr(own, f"balance_{of}", True)
            config = BalanceConfig()
            on = type(getattr(config, of))(enabled=True)
            config, notes = check_balancers(own, dataclasses.replace(config, **{of: on}), frozenset())
        except incompatible.IncompatibleError as error:
            said[of] = True, tuple(f"`{flag}`: {why}" for flag, why in error.why.items())
        except ValueError as error:
            said[of] = True, (str(error),)
        else:
            if getattr(config, of).enabled:
                said[of] = False, tuple(notes)
    return said | {REPORT: (False, tuple(notes_on_report(args)))}


def _found() -> tuple[list[Found], dict[str, str]]:
    """What the checks say of each recipe; and the recipes that cannot be made, with the reason."""
    from tests.support.recipes import begin
    from tests.support.stand_ins.frameworks import install_bridge

    parser = begin(install_bridge)
    configs, failed = _made()
    defaults = parser.parse_args([])
    found = []
    for (package, name), config in configs.items():
        family = next(title for title, pattern in _FAMILIES[package].items() if name.startswith(pattern))
        args = _flags(config, name, defaults)
        number_format = "NVFP4" if args.fp4 else f"fp8 {args.fp8_recipe}" if args.fp8 else "bf16"
        found.append(Found(name, family, number_format, _said(args), _as_recipe(args, defaults, parser)))
    return found, failed


# Those that are trained.


def _chosen(found: Sequence[Found], family: str) -> Chosen:
    """The recipe that stands for a family: the first that most balancers accept, in bf16 if there is one. Patterns of
    prediction layers cannot be shrunk."""
    of_family = [
        recipe for recipe in found if recipe.family == family and "mtp_hybrid_override_pattern" not in recipe.flags
    ]
    best = max(of_family, key=lambda recipe: (len(recipe.accepted), recipe.number_format == "bf16"))
    return Chosen(best.name, ranks_of(best.name), best.flags, tuple(f"--balance-{of}" for of in best.accepted))


def write_chosen(path: str) -> None:
    """Write the recipe that stands for each family to `path`: JSON of the fields of `Chosen`, by family."""
    warnings.simplefilter("ignore")
    found, _ = _found()
    chosen = {family: dataclasses.asdict(_chosen(found, family)) for family in families()}
    Path(path).write_text(json.dumps(chosen))


# Tables.


def families() -> list[str]:
    """The families in the order of the tables."""
    return sorted({title for titles in _FAMILIES.values() for title in titles})


def _trained(found: Sequence[Found]) -> list[str]:
    """Lines of a table: the recipe of each family that tests train, and what is changed in it; and why."""
    lines = [
        "Shrunk for a CPU as [below](#functional-configurations), each trains three iterations without balancers, with",
        "each of these, and with all. Losses and parameters are equal to 1e-12 in float64, or to rounding in float32",
        "with stand-ins for Transformer Engine. Of vision-language models it is the language model.",
        "",
        "| family | recipe | equal to the plain run with | changed |",
        "|---|---|---|---|",
    ]
    for family in families():
        chosen = _chosen(found, family)
        if why := CANNOT_TRAIN.get(family):
            lines.append(f"| {family} | none | not trained: {why} | |")
            continue
        changed = [f"`--{each.flag}` {each.instead or 'left out'}" for each in changes(chosen.flags)]
        balancers = ", ".join(f"`{flag}`" for flag in chosen.balancers)
        lines.append(f"| {family} | {chosen.name} | {balancers} | {', '.join(changed).replace('_', '-')} |")
    return [*lines, "", *(f"- `--{each.flag.replace('_', '-')}`: {each.why}" for each in CHANGED)]


def _cell(found: Sequence[Found], of: str) -> str:
    """How many recipes are accepted, of how many that it applies to."""
    applies = [recipe.said[of] for recipe in found if of in recipe.said]
    if not applies:
        return "nothing to balance"
    refused = sum(is_refused for is_refused, _ in applies)
    noted = sum(bool(lines) and not is_refused for is_refused, lines in applies)
    return f"{len(applies) - refused} of {len(applies)}" + f" ({noted} with a note)" * bool(noted)


def _counted(found: Sequence[Found], *, refused: bool) -> list[str]:
    """Lines of a table: a reason or note, of what, and how many recipes have it; the most frequent first. Numbers in
    notes differ from recipe to recipe and are left out."""
    counts: Counter[tuple[str, str]] = Counter()
    for recipe in found:
        for of, (is_refused, lines) in recipe.said.items():
            if is_refused == refused:
                counts.update({(of, re.sub(r"\b\d+\b", "N", line)) for line in lines})
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"| {count} | {_FLAGS[of]} | {_marked(line)} |" for (of, line), count in ordered]


def _marked(line: str) -> str:
    """Flags in a line as code."""
    return re.sub(r"(?<!`)(--[a-z0-9-]+)", r"`\1`", line).replace("|", "\\|")


def markdown(found: Sequence[Found], failed: Mapping[str, str]) -> str:
    """The tables of docs/recipes.md."""
    recipes = f"Megatron-Bridge {version('megatron_bridge')} has {len(found)} performance recipes with experts."
    lines = [recipes, "", f"| family | recipes | {' | '.join(_FLAGS.values())} |", "|---|---|---|---|---|---|"]
    for family in families():
        of_family = [recipe for recipe in found if recipe.family == family]
        cells = [_cell(of_family, of) for of in _FLAGS]
        lines.append(f"| {family} | {len(of_family)} | {' | '.join(cells)} |")
    lines.append(f"| **all** | {len(found)} | {' | '.join(_cell(found, of) for of in _FLAGS)} |")
    counts = {
        "Machines": Counter(re.findall(r"gpu_([a-z]+\d+)_", recipe.name)[0].upper() for recipe in found),
        "Number formats": Counter(recipe.number_format for recipe in found),
    }
    for what, each in counts.items():
        lines += ["", f"{what}: {', '.join(f'{name} {count}' for name, count in sorted(each.items()))}."]
    for why, count in Counter(failed.values()).items():
        lines += ["", f"{count} more cannot be made: {why}."]
    lines += ["", "| recipes | refused with | since |", "|---|---|---|", *_counted(found, refused=True)]
    lines += ["", "| recipes | accepted with | and a note |", "|---|---|---|", *_counted(found, refused=False)]
    lines += ["", "### One recipe of each family", "", *_trained(found)]
    return "\n".join(lines) + "\n"


def written() -> str:
    """The page with its tables as they should be."""
    warnings.simplefilter("ignore")
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "docs/recipes.md has no place for the tables"
    return f"{before}{begin}\n{markdown(*_found())}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written())
