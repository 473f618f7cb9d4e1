"""The fastest kernel of attention that a device has, chosen by measurement.

Each kernel that is there is first compared with matrix products in float64 on small pieces of every kind, forward and
backward, with NaN in the memory that its results get. One that computes something else is left out. Then each runs
long and short pieces. All ranks take the largest of their times, so they choose the same kernel. With
`torch.use_deterministic_algorithms` a kernel whose gradients do not repeat bit for bit is left out, too.

A kernel may refuse a kind of pieces, here or later in a step: these go to the next kernel in the order of `KERNELS`,
with a warning. The last are matrix products, which take all.
"""

import importlib.metadata
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from balancing.kernels.base import CPU, PRODUCTS, Kernel, OfOneSize, Pieces, generators, refusal
from balancing.kernels.cudnn import CudnnPacked
from balancing.kernels.flash import PackageFlash, TorchFlash
from balancing.kernels.trial import (
    TOLERANCE,
    AttentionHeads,
    difference,
    kind_of,
    repeats,
    samples,
    seconds_a_flop,
)

__all__ = [
    "CLEARLY",
    "KERNELS",
    "Choice",
    "KernelError",
    "KernelsInTurn",
    "choose_among",
    "choose_kernel",
    "in_one_line",
    "kernels_of_gpu",
    "largest",
    "planned_kernels",
]

# Names that a setting may have -> what they stand for. Of equally fast kernels the first is taken.
KERNELS = {
    "cudnn": "cuDNN by Transformer Engine",
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "flash-attn": "flash-attn",
    "fa2": "FlashAttention 2",
}
_FAMILIES = {"auto": (*KERNELS,), "flash": ("fa3", "fa4", "flash-attn", "fa2"), "fused": ("cudnn",)}
_SWITCHED = {9: ("fa3", "fa4"), 10: ("fa4",)}  # by compute capability, beside those for all GPUs
_TAKE_TWO_SIZES = ("cudnn", "fa3")  # those that may take values of another size than keys
_HEAD_SIZES = range(8, 257, 8)  # that kernels for GPUs have
CLEARLY = 0.97  # a kernel takes the place of one before it if it needs at most this part of its time


class KernelError(ValueError):
    """The kernel that was asked for does not run here; one line says why."""


class Choice(NamedTuple):
    """A chosen kernel.

    kernel: the chosen one and, for the pieces that it does not take, the others.
    name: name of the chosen one, as in `KERNELS`; "products" or "cpu" for those that run anywhere.
    line: for the user.
    rates: name -> FLOP/s of each kernel that was timed, forward and backward, mean of long and short pieces.
    """

    kernel: Kernel
    name: str
    line: str
    rates: Mapping[str, float]


class _Found(NamedTuple):
    """A kernel that is there. refused: kind of pieces -> why it does not take them. wrong: why it is left out."""

    name: str
    title: str
    kernel: Kernel
    refused: dict[str, str]
    wrong: str = ""


Load = Callable[[], tuple[str, Kernel]]  # title and kernel; raises where it is not there

_chosen: dict[Any, Choice] = {}


def choose_kernel(
    device: torch.device,
    heads: AttentionHeads,
    wanted: str = "auto",
    process_group: dist.ProcessGroup | None = None,
    had: str | None = None,
) -> Choice:
    """The fastest kernel on `device`, measured at the first call with these arguments.

    wanted: "auto", "flash" for the fastest FlashAttention, "fused" for cuDNN, or a name of `KERNELS`. CPUs have one
        kernel.
    process_group: the ranks that choose together, all if None; all of them call at the same time.
    had: the name of the kernel that a resumed run had. It is taken if `wanted` does not exclude it and it runs here.

    Raises KernelError, on all ranks, if no kernel that `wanted` names runs here.
    """
    if device.type == "cpu":
        own: Kernel = CPU if heads.size == heads.value_size else OfOneSize(CPU)
        return Choice(own, "cpu", "attention: torch's flash attention for CPUs", {})
    if (
        device.type != "cuda"
        or heads.dtype not in (torch.float16, torch.bfloat16)
        or max(heads.size, heads.value_size) not in _HEAD_SIZES
    ):
        why = f"flash attention has none for {heads.dtype} and heads of {max(heads.size, heads.value_size)}"
        return Choice(PRODUCTS, "products", f"attention: matrix products, since {why}", {})
    key = device, heads, wanted, process_group, had, torch.are_deterministic_algorithms_enabled()
    if key not in _chosen:
        loads = _loads(torch.cuda.get_device_capability(device)[0])
        _chosen[key] = choose_among(loads, device, heads, wanted, process_group, had)
    return _chosen[key]


def choose_among(
    loads: Mapping[str, Load],
    device: torch.device,
    heads: AttentionHeads,
    wanted: str = "auto",
    process_group: dist.ProcessGroup | None = None,
    had: str | None = None,
) -> Choice:
    """As `choose_kernel`, of the kernels that `loads` load, by name, on any device."""
    named = _FAMILIES.get(wanted, (wanted,))
    if had in named and len(named) > 1:
        try:
            choice = choose_among(loads, device, heads, had, process_group)
            return choice._replace(line=f"{choice.line}; it is the checkpoint's")
        except KernelError as error:
            choice = choose_among(loads, device, heads, wanted, process_group)
            return choice._replace(line=f"{choice.line}; not the checkpoint's: {error}")
    there, absent = _find({name: loads[name] for name in KERNELS if name in loads})
    found = {one.name: _checked(one, device, heads) for one in there}
    costs = {name: math.inf for name in KERNELS}
    fit = [one for one in found.values() if one.name in named and not one.wrong]
    for one in fit:
        costs[one.name] = seconds_a_flop(one.kernel, device, heads) if len(fit) > 1 else 0.0
    kinds = [*samples(heads)]
    own = [[costs[name], *(float(name in found and kind in found[name].refused) for kind in kinds)] for name in KERNELS]
    for name, (cost, *refuses) in zip(KERNELS, largest(own, device, process_group), strict=True):
        costs[name] = cost
        for kind, refused in zip(kinds, refuses, strict=True):
            if refused and name in found:
                found[name].refused.setdefault(kind, "another rank does not run them")
    if not (usable := [name for name in named if costs[name] < math.inf]):
        why = [f"{one.title}: {one.wrong or 'not on all ranks'}" for name, one in found.items() if name in named]
        why += _missing_phrases({name: reason for name, reason in absent.items() if name in named})
        raise KernelError(f"attention kernel {wanted} does not run here: {'; '.join(why) or 'not for this GPU'}")
    chosen = usable[0]
    for name in usable[1:]:
        if costs[name] < CLEARLY * costs[chosen]:
            chosen = name
    # Not in the order of their times, so that a run repeats if the first is named.
    behind = [one for one in found.values() if not one.wrong and one.name != chosen]
    in_turn = [found[chosen], *behind, _Found("products", "matrix products", PRODUCTS, {})]
    rates = {name: 1 / costs[name] for name in usable if costs[name]}
    wrong = [f"{one.title} left out: {one.wrong}" for one in found.values() if one.wrong]
    line = "; ".join([*_rate_phrases(in_turn, rates), *wrong, *_missing_phrases(absent), *_fallback_phrases(in_turn)])
    return Choice(KernelsInTurn(in_turn), chosen, f"attention: {line}", rates)


def planned_kernels(wanted: str = "auto", there: Collection[str] = ("fa2",)) -> tuple[str, ...]:
    """Names of the kernels among which `wanted` will choose, for `Cluster.with_kernel` before one is chosen.

    wanted: as in `choose_kernel`.
    there: names of what is installed, or assumed where nobody knows; torch has "fa2". If `wanted` names none of them,
        all that it names.
    """
    named = _FAMILIES.get(wanted, (wanted,))
    return tuple(name for name in named if name in there) or named


def kernels_of_gpu(device: torch.device) -> list[tuple[str, str, Kernel]]:
    """(name, title, kernel) of each that is installed for a GPU, unchecked."""
    return [(one.name, one.title, one.kernel) for one in _find(_loads(torch.cuda.get_device_capability(device)[0]))[0]]


class KernelsInTurn:
    """A kernel made of several: each call goes to the first that takes its kind of pieces.

    The last takes all. If another than the first computes a kind for an unexpected reason, a warning is logged once.
    """

    def __init__(self, kernels: Sequence[_Found]) -> None:
        self._kernels = kernels
        self._warned: set[tuple[str, str]] = set()

    @property
    def generators(self):
        return [generator for one in self._kernels for generator in generators(one.kernel)]

    def forward(self, q, k, v, pieces, scale):
        return self._first(False, q, k, v, pieces, lambda kernel: kernel.forward(q, k, v, pieces, scale))

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        return self._first(
            True, q, k, v, pieces, lambda kernel: kernel.backward(grad, q, k, v, out, logsumexp, pieces, scale)
        )

    def _first(self, backward: bool, q: Any, k: Any, v: Any, pieces: Pieces, call: Callable[[Kernel], Any]) -> Any:
        kind = kind_of(pieces)
        for one in self._kernels[:-1]:
            if kind in one.refused:
                continue
            if not (why := refusal(one.kernel, backward, q, k, v, pieces)):
                try:
                    return call(one.kernel)
                except Exception as error:  # of whatever kind: the next kernel computes the same
                    why = in_one_line(error)
                    if not isinstance(error, torch.OutOfMemoryError):  # which may not come again
                        one.refused[kind] = why
            if (one.title, kind) not in self._warned:
                self._warned.add((one.title, kind))
                warnings.warn(f"attention: {one.title} leaves {kind} to the next kernel: {why}", stacklevel=4)
        return call(self._kernels[-1].kernel)


# Loading and checking.


def _loads(major: int) -> dict[str, Load]:
    """The kernels for GPUs of a compute capability, of which `major` is the first number."""
    switched: dict[str, Load] = {name: partial(_switched, name) for name in _SWITCHED.get(major, ())}
    return {"cudnn": _cudnn, **switched, "flash-attn": _package, "fa2": lambda: (KERNELS["fa2"], TorchFlash())}


def _cudnn() -> tuple[str, Kernel]:
    kernel = CudnnPacked()
    return f"cuDNN {kernel.version} by Transformer Engine", kernel


def _switched(name: str) -> tuple[str, Kernel]:
    return KERNELS[name], TorchFlash(name.upper())


def _package() -> tuple[str, Kernel]:
    return f"flash-attn {importlib.metadata.version('flash-attn')}", PackageFlash()


def _find(loads: Mapping[str, Load]) -> tuple[list[_Found], dict[str, str]]:
    """The kernels that are there, not yet checked, and of the others: name -> why not, "" if not installed."""
    found, absent = [], {}
    for name, load in loads.items():
        try:
            title, kernel = load()
        except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
            absent[name] = ""
        except Exception as error:  # broken, built for another torch, or unknown to this torch
            absent[name] = in_one_line(error)
        else:
            found.append(_Found(name, title, kernel, {}))
    return found, absent


def _checked(one: _Found, device: torch.device, heads: AttentionHeads) -> _Found:
    """A kernel after comparison with matrix products. If values have another size than keys, they are padded for
    kernels that do not take them."""
    if heads.size == heads.value_size:
        return _compared(one, device, heads)
    padded = one._replace(kernel=OfOneSize(one.kernel))
    if one.name not in _TAKE_TWO_SIZES:
        return _compared(padded, device, heads)
    checked = _compared(one, device, heads)
    return _compared(padded, device, heads) if checked.wrong or checked.refused else checked


def _compared(one: _Found, device: torch.device, heads: AttentionHeads) -> _Found:
    refused: dict[str, str] = {}
    for kind, pieces in samples(heads).items():
        try:
            what, error = difference(one.kernel, device, heads, pieces)
        except Exception as failure:  # of whatever kind: it does not take them
            refused[kind] = in_one_line(failure)
            continue
        if not error <= TOLERANCE[heads.dtype]:
            return one._replace(wrong=f"its {what} of {kind} differ by {error:.1e}")
    checked, wrong = one._replace(refused=refused), refused.get("causal pieces", "")
    if not wrong and torch.are_deterministic_algorithms_enabled() and not repeats(one.kernel, device, heads):
        wrong = "its gradients do not repeat bit for bit"
    return checked._replace(wrong=wrong)


def largest(
    numbers: list[list[float]], device: torch.device, process_group: dist.ProcessGroup | None
) -> list[list[float]]:
    """The largest of each number on all ranks of the group."""
    if not dist.is_initialized():
        return numbers
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=process_group)
    return found.tolist()


# Words.


def _rate_phrases(in_turn: Sequence[_Found], rates: Mapping[str, float]) -> list[str]:
    """The chosen kernel and the others that were timed, with their TFLOP/s."""
    first, *others = in_turn
    rate = f", {rates[first.name] / 1e12:.0f} TFLOP/s" if first.name in rates else ""
    return [f"{first.title}{rate}", *(f"{o.title} {rates[o.name] / 1e12:.0f}" for o in others if o.name in rates)]


def _missing_phrases(absent: Mapping[str, str]) -> list[str]:
    """One phrase per broken kernel, and one for all that are not installed. absent: as from `_find`."""
    missing = [KERNELS[name] for name, why in absent.items() if not why]
    broken = [f"{KERNELS[name]}: {why}" for name, why in absent.items() if why]
    return [*broken, *([f"not installed: {', '.join(missing)}"] if missing else [])]


def _fallback_phrases(in_turn: Sequence[_Found]) -> Iterator[str]:
    """One phrase per kind of pieces that the chosen kernel cannot compute."""
    for kind, why in in_turn[0].refused.items():
        other = next(one.title for one in in_turn if kind not in one.refused)
        yield f"{kind} go to {other}: {why}"


def in_one_line(error: Exception) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}".strip()
