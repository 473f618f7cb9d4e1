"""Speed as a share of forced balance, by MoE layers of a rank and number of micro-batches.

    python -m benchmarks.experts.regimes [--quick] [--ranks 8|16] [--cells 2x4,4x1] [--modelled] [--json FILE]

With few layers and few micro-batches, transfers have little compute to hide under. Each cell is layers x micro-batches
with made-up loads that drift from step to step, on the machine of `benchmarks.experts.emulated_workload`:

- modelled, by the planners' cost model (`balancing.experts.cost`): no replicas, the plans of training, and a bound. No
  placement costs less than the bound. It assumes that inside a node transfers are free and ranks balanced, and that
  between nodes transfers fill all NICs evenly, and each replica keeps most tokens in its node.
- emulated (`benchmarks.experts.emulated`): no replicas; the same plans with transfers sent whole, in chunks that fit
  under compute, and as in training (`chosen`): in chunks, except for the first layer's gradients.

Even loads are 100 %. More is possible, since replicas keep tokens in their node. Emulated experts compute whole tiles,
modelled ones do not. The full table takes twenty minutes of a quiet machine, --quick three minutes, --modelled seconds.
Exit code 1 if `chosen` is more than a point below the best of whole, in parts and none.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.command import exit_code, load_before, parser, write_rows
from benchmarks.experts.emulated import CEILING, EXPERT_SECONDS, VARIANTS, measure_all
from benchmarks.experts.emulated_workload import Scale, made_up_loads
from benchmarks.experts.modelled import bound_of_forced_balance, of_forced_balance

__all__ = ["Cell"]

_EXPERTS = 32
_ALL = [(layers, count) for layers in (1, 2, 4, 8) for count in (1, 2, 4, 8)]
_CELLS = {8: _ALL, 16: [(1, 2), (2, 2), (2, 4), (4, 2)]}
_QUICK = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 1)]
_LAUNCH = 28  # layers x micro-batches of one launch of ranks: some minutes
_METHODS = {
    "none": "none",
    "whole": "quota, whole transfers",
    "in parts": "quota, transfers in parts",
    "chosen": "quota",
}
_POINT = 0.01


@dataclass
class Cell:
    """Shares of forced balance of one number of layers and micro-batches.

    modelled: of "none", "chosen" and "bound".
    emulated: of each of "none", "whole", "in parts" and "chosen"; empty where it was not run.
    imbalance: tokens of the busiest rank over the mean with replicas, emulated.
    exposed: seconds for which a rank waited for transfers in a step, chosen, emulated.
    """

    layers: int
    micro_batches: int
    modelled: dict[str, float]
    emulated: dict[str, float]
    imbalance: float = 0.0
    exposed: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether what was chosen is the best of the others, to a point."""
        others = [share for name, share in self.emulated.items() if name != "chosen"]
        return not others or self.emulated["chosen"] >= max(others) - _POINT


def _modelled(cell: tuple[int, int], scale: Scale) -> Cell:
    layers, count = cell
    loads = made_up_loads(scale, layers, min(count, 4), 3)
    shares = {
        "none": of_forced_balance(loads, scale, "none", count),
        "chosen": of_forced_balance(loads, scale, "quota", count),
        "bound": bound_of_forced_balance(loads, scale, count),
    }
    return Cell(layers, count, shares, {})


def _emulate(cells: Sequence[Cell], scale: Scale) -> None:
    """Run the cells and fill in what was found."""
    variants = [VARIANTS[name] for name in (CEILING, *_METHODS.values())]
    launches: list[list[Cell]] = [[]]
    for cell in cells:
        if sum(each.layers * each.micro_batches for each in [*launches[-1], cell]) > _LAUNCH and launches[-1]:
            launches.append([])
        launches[-1].append(cell)
    for launch in launches:
        jobs = [(made_up_loads(scale, cell.layers, cell.micro_batches, 1), variants) for cell in launch]
        found, reason = measure_all(jobs, scale)
        if reason:
            print(f"loopback, NICs not limited: {reason}")
        for cell, rows in zip(launch, found, strict=True):
            of = {row.method: row for row in rows}
            cell.emulated = {name: of[method].of_ceiling for name, method in _METHODS.items()}
            cell.imbalance, cell.exposed = of["quota"].imbalance, of["quota"].exposed
            _print(cell)


def _print(cell: Cell) -> None:
    modelled = "".join(f"{cell.modelled[name]:9.1%}" for name in ("none", "chosen", "bound"))
    emulated = "".join(f"{cell.emulated[name]:10.1%}" for name in _METHODS) if cell.emulated else ""
    more = f"{cell.imbalance:10.3f}{cell.exposed * 1e3:8.0f} ms" if cell.emulated else ""
    lost = "" if cell.kept else "  LOST"
    print(f"{cell.layers:6} x {cell.micro_batches:<6}{modelled}   {emulated}{more}{lost}", flush=True)


def _cells(text: str) -> list[tuple[int, int]]:
    try:
        cells = [tuple(map(int, each.split("x"))) for each in text.split(",")]
        if all(len(cell) == 2 and min(cell) > 0 for cell in cells):
            return [(layers, count) for layers, count in cells]
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not layers x micro-batches, such as 2x4,4x1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 where a cell lost or ranks failed."""
    options_of = parser("experts.regimes", __doc__, "8 ranks, five cells; three minutes")
    options_of.add_argument("--ranks", type=int, choices=(8, 16), default=8)
    options_of.add_argument("--cells", type=_cells, metavar="LxM,...", help="layers x micro-batches; all by default")
    options_of.add_argument("--modelled", action="store_true", help="model only, without emulation")
    options = options_of.parse_args(arguments)
    return exit_code("regimes", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    scale = Scale(options.ranks, _EXPERTS, EXPERT_SECONDS[options.ranks])
    sizes = options.cells or (_QUICK if options.quick else _CELLS[options.ranks])
    print(f"{load_before()}; throughput over forced balance")
    print(f"{scale.ranks} ranks     modelled: none, chosen, bound   emulated: {', '.join(_METHODS)}, max/mean, exposed")
    cells = [_modelled(size, scale) for size in sizes]
    if options.modelled:
        for cell in cells:
            _print(cell)
    else:
        _emulate(cells, scale)
    write_rows(options.json, cells)
    return 0 if all(cell.kept for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
