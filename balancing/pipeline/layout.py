"""Conversion between plans and strings of Megatron's --pipeline-model-parallel-layout.

The string lists the virtual stages along the pipeline, separated by |. E is the embedding, t a transformer layer, m a
multi-token-prediction layer, L the head with the loss. x*n repeats a letter or |. (...)*n repeats a part without inner
parentheses. Commas are ignored. "Et*3|(tt|)*2t,L" is four stages of 3, 2, 2 and 1 layers.
"""

import re
from dataclasses import replace
from itertools import groupby

from balancing.pipeline.stage_plan import StagePlan

__all__ = ["from_layout", "to_layout"]


def to_layout(plan: StagePlan) -> str:
    """The layout string of `plan`."""
    runs = ["t" * len(chunk) if len(chunk) < 4 else f"t*{len(chunk)}" for chunk in plan.order]
    runs[len(runs) - 1 - plan.behind] += "m" * plan.tail_layers
    if len(runs) == 1:
        return f"E{runs[0]}L"
    middle = ""
    for run, same in groupby(runs[1:-1]):
        count = len(list(same))
        stage = f"{run}|"
        middle += f"({stage})*{count}" if run and count > 2 else stage * count
    return f"E{runs[0]}|{middle}{runs[-1]}L"


def from_layout(layout: str, stages: int, *, layers: int | None = None) -> StagePlan:
    """The plan of a layout string.

    stages: pipeline size.
    layers: transformer layers of the model; None to take the number in the string.

    Raises ValueError for an unknown character, a repetition that cannot be read, a number of virtual stages that is no
    multiple of `stages`, E or L missing, repeated or out of place, t after m, m on several virtual stages, and another
    number of layers than `layers`.
    """
    if stages < 1:
        raise ValueError(f"stages={stages} must be at least 1")
    chunks = _unrolled(layout).split("|")
    if len(chunks) % stages:
        raise ValueError(
            f"layout {layout!r} has {len(chunks)} virtual stages, which {stages} pipeline stages do not divide; "
            "add or remove a |"
        )
    along = "".join(chunks)
    for letter, what, place in (("E", "embedding", 0), ("L", "loss", len(along) - 1)):
        if along.count(letter) != 1 or along.find(letter) != place:
            raise ValueError(f"layout {layout!r} must have {letter}, the {what}, once and at its very "
                             + ("beginning" if place == 0 else "end"))  # fmt: skip
    if "t" in along[along.find("m") :] and "m" in along:
        raise ValueError(f"layout {layout!r} has a t after an m; multi-token prediction comes after all layers")
    predicting = [number for number, chunk in enumerate(chunks) if "m" in chunk]
    if len(predicting) > 1:
        raise ValueError(f"layout {layout!r} has m on {len(predicting)} virtual stages; all must be on one")
    has = along.count("t")
    if layers is not None and has != layers:
        fault = f"drops {layers - has}" if has < layers else f"adds {has - layers}"
        raise ValueError(f"layout {layout!r} has {has} layers, the model {layers}: it {fault}")
    bounds = [0]
    for chunk in chunks:
        bounds.append(bounds[-1] + chunk.count("t"))
    plan = StagePlan.from_bounds(bounds, stages)
    return replace(plan, tail_layers=along.count("m"), tail_chunk=predicting[0]) if predicting else plan


def _unrolled(layout: str) -> str:
    """The string with repetitions expanded. It has only letters and |."""
    text = layout.replace(",", "").replace(" ", "")
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda part: part[1] * int(part[2]), _guarded(text, layout))
    text = re.sub(r"([EtmL|])\*(\d+)", lambda part: part[1] * int(part[2]), text)
    if odd := re.search(r"[^EtmL|]", text):
        raise ValueError(f"layout {layout!r} has {odd[0]!r}; only E, t, m, L, | and repetitions are allowed")
    return text


def _guarded(text: str, layout: str) -> str:
    """`text`. Raises ValueError for a repetition of more than 10,000 times, more layers than any model has."""
    most = 1
    for number in re.findall(r"\*(\d+)", text):
        most = max(most, int(number))
    if most > 10_000:
        raise ValueError(f"layout {layout!r} repeats something {most} times")
    return text
