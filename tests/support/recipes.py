"""Whether Megatron-LM and the balancers accept recipes, as the table of docs/recipes.md says.

    python -m tests.support.recipes FILE...

Each recipe is a dry run (`megatron.balanced.trainer.dry_run`) in a process of its own, forked from one that has
imported Megatron-LM. Recipes are written for Megatron-LM's development branch, so some flags are translated for the
version that is installed, and the answer says which.
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.balanced.trainer.checks.megatron import MEGATRON_VERSIONS, check_megatron
from tests.support.recipe_files import Recipe, read_recipes

__all__ = ["Verdict", "begin", "command_line", "markdown", "verdicts"]

BALANCERS = ("--balance-experts", "--balance-layers", "--balance-sequences")
_NAMED = 4  # flags that a line names
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Verdict:
    """What a dry run says of one command line.

    refusal: the line with which it is refused; empty if it is accepted.
    why: flag that the balancer does not work with -> the reason; empty for a refusal of another kind.
    idle: why the balancer that is asked for has nothing to do; empty if it has.
    translated: the flags that were changed for the installed Megatron-LM.
    report: lines that a dry run prints.
    """

    refusal: str = ""
    why: Mapping[str, str] = field(default_factory=dict)
    idle: str = ""
    translated: tuple[str, ...] = ()
    report: tuple[str, ...] = ()


# Flags of a recipe as arguments.


def _translate(flags: dict[str, Any]) -> tuple[str, ...]:
    """Change flags in place that Megatron-LM 0.19.2 has under another name or not at all. Returns them in words."""
    words = []
    if "cuda_graph_scope" in flags:
        scope = flags.pop("cuda_graph_scope")
        if scope in ("full_iteration", ["full_iteration"]):
            flags["cuda_graph_impl"] = "full_iteration"
            words.append("--cuda-graph-impl full_iteration")
        else:
            flags["cuda_graph_modules"] = scope
            words.append("--cuda-graph-modules")
    if "hybrid_override_pattern" in flags:
        flags["hybrid_layer_pattern"] = flags.pop("hybrid_override_pattern")
        flags.pop("is_hybrid_model", None)
        words.append("--hybrid-layer-pattern")
    if flags.get("cross_entropy_loss_fusion") is True and flags.get("cross_entropy_fusion_impl") == "te":
        flags["cross_entropy_fusion_impl"] = "native"
        words.append("--cross-entropy-fusion-impl native")
    return tuple(words)


def command_line(recipe: Recipe, parser: argparse.ArgumentParser) -> tuple[list[str], tuple[str, ...]]:
    """The arguments that a recipe stands for, and in words those that were translated.

    parser: Megatron-LM's; flags that it does not know are left to it to refuse. A flag may also have the name that the
    parser stores it under, as overlap_p2p_comm, which --no-overlap-p2p-communication switches off. Values with a
    variable of the shell that is not set are left out: they are paths, which a job fills in.

    Raises ValueError for a value that cannot belong to the flag.
    """
    flags = {
        name: os.path.expandvars(value) if isinstance(value, str) else value for name, value in recipe.flags.items()
    }
    translated = _translate(flags)
    arguments = []
    for name, value in flags.items():
        if value is None or value is False or (isinstance(value, str) and re.search(r"\$\{?\w", value)):
            if value is False:
                arguments += _switched_off(name, parser)
            continue
        option = "--" + name.replace("_", "-")
        action = parser._option_string_actions.get(option)
        if action is None and value is True and any(a.dest == name and a.default is True for a in parser._actions):
            continue  # on by default; only its opposite is a flag
        if action is not None and action.nargs == 0:
            if value not in (True, "true", "True"):
                raise ValueError(f"{recipe.name}: {option} is a flag without a value, not {value!r}; use true or false")
            arguments.append(option)
        elif value is True:
            arguments.append(option)
        else:
            arguments += _with_values(option, value, is_list=action is not None and action.nargs is not None)
    return arguments, translated


def _switched_off(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """The flag that switches off what is on by default; none where `name` is off by default."""
    opposites = [
        action for action in parser._actions if action.dest == name and action.const is False and action.default is True
    ]
    return [opposites[0].option_strings[0]] if opposites else []


def _with_values(option: str, value: Any, *, is_list: bool) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [option, *map(str, value)]
    if is_list:
        return [option, *shlex.split(str(value))]
    text = str(value)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return [f"{option}={text}"]


def _parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    from megatron.balanced.trainer.arguments import add_balance_flags

    return add_balance_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


# Dry runs.


def _answer(arguments: Sequence[str], environment: Mapping[str, str]) -> Verdict:
    """Dry-run a command line in this process, which is of use only for dry runs of the same recipe afterwards.

    environment: with WORLD_SIZE; replaces the launcher's.
    """
    from megatron.balanced.run import Run
    from megatron.balanced.shared.incompatible import IncompatibleError
    from megatron.balanced.trainer import patches
    from megatron.balanced.trainer.arguments import parse_arguments
    from megatron.balanced.trainer.dry_run import plan_lines

    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ |= environment
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    out, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(refused):
        try:
            args, config = parse_arguments([*arguments, "--balance-dry-run"])
        except SystemExit as stopped:
            lines = [line for line in refused.getvalue().splitlines() if line.strip()]
            cause = stopped.__cause__
            why = cause.why if isinstance(cause, IncompatibleError) else {}
            return Verdict(lines[-1].removeprefix("pretrain_gpt.py: error: "), why)
        report = [*patches.rows(args, config, Run()), *plan_lines(args, config)]
    said = out.getvalue().splitlines()
    idle = re.findall(r"has nothing to balance: (.*)", out.getvalue())
    return Verdict(idle="; ".join(idle), report=(*said, *report))


def _answer_all(job: tuple[list[list[str]], dict[str, str]]) -> list[Verdict]:
    lines, environment = job
    return [_answer(arguments, environment) for arguments in lines]


def verdicts(recipes: Sequence[Recipe], also: Sequence[str] = ()) -> dict[str, list[Verdict]]:
    """Dry-run each recipe on the ranks that its name tells. Recipe's name -> the verdicts: of Megatron-LM alone, with
    each balancer, and with each flag of `also`.

    Called in a process that has not imported Megatron-LM. Raises ValueError for values that do not belong to their
    flags.
    """
    choices: list[list[str]] = [[], *([flag] for flag in (*BALANCERS, *also))]
    parser = begin()
    found, jobs = {}, {}
    for recipe in recipes:
        arguments, translated = command_line(recipe, parser)
        unknown = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        names = [word[2:].replace("-", "_") for word in unknown if word not in parser._option_string_actions]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            line = (
                f"Megatron-LM {MEGATRON_VERSIONS[-1]} does not know {', '.join(names[:_NAMED])}{more}; drop what it "
                "does not know from the recipe"
            )
            found[recipe.name] = [Verdict(line, translated=translated)] * len(choices)
            continue
        found[recipe.name] = []
        environment = recipe.environment | {"WORLD_SIZE": str(recipe.ranks)}
        jobs[recipe.name, translated] = [[*arguments, *choice] for choice in choices], environment
    processes = max(1, min(len(jobs), os.cpu_count() or 1))
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for (name, translated), own in zip(jobs, pool.map(_answer_all, jobs.values(), chunksize=1), strict=True):
            found[name] = [replace(verdict, translated=translated) for verdict in own]
    return found


def begin(install: Callable[[], None] | None = None) -> argparse.ArgumentParser:
    """Import Megatron-LM as a dry run does. Returns the parser of pretrain_gpt.py.

    install: called before anything of Megatron-LM is imported.
    """
    from megatron.balanced.cpu.device import use_cpu
    from megatron.balanced.trainer.dry_run import assume_packages, assume_ranks

    check_megatron()
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    warnings.simplefilter("ignore")
    assumes = assume_ranks(["--balance-dry-run"])
    if not assumes:
        use_cpu()
    if install is not None:
        install()
    if assumes:
        assume_packages()
    import megatron.balanced.trainer.train  # noqa: F401  so that the forks need not

    return _parser()


# Tables.


def markdown(found: Mapping[str, Sequence[Verdict]]) -> str:
    """A Markdown table, a row a recipe and a column a balancer, and below it the reasons.

    found: as `verdicts` returns it.
    """
    columns = ["Megatron-LM alone", *map("`{}`".format, BALANCERS)]
    rows = [["recipe", *columns], ["---"] * (len(columns) + 1)]
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, (alone, *balanced) in found.items():
        cells = [_cell(alone)]
        if alone.translated and not alone.refusal:
            cells[0] += f", with `{'`, `'.join(alone.translated)}`"
        for column, verdict in zip(columns[1:], balanced, strict=True):
            cells.append("as Megatron-LM" if verdict.refusal and verdict.refusal == alone.refusal else _cell(verdict))
            for flag, why in (verdict.why or ({"idle": verdict.idle} if verdict.idle else {})).items():
                reasons.setdefault(flag, {}).setdefault(why, []).append(column)
        rows.append([name, *cells])
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
    for flag, whys in sorted(reasons.items()):
        text = "; ".join(f"{why} ({', '.join(dict.fromkeys(of))})" for why, of in whys.items())
        lines.append(f"- `{flag}`: {text}" if flag != "idle" else f"- idle: {text}")
    return "\n".join(lines) + "\n"


def _cell(verdict: Verdict) -> str:
    if verdict.why:
        return f"refused: `{'`, `'.join(sorted(verdict.why))}`"
    if verdict.refusal:
        return f"refused: {verdict.refusal}"
    return "idle" if verdict.idle else "accepted"


if __name__ == "__main__":
    print(markdown(verdicts([recipe for path in sys.argv[1:] for recipe in read_recipes(Path(path))])), end="")
