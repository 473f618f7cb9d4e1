"""Notes on what `--balance-report` sees."""

import argparse

from megatron.balanced.shared.captured_schedule import captures_iterations

__all__ = ["notes_on_report"]


def notes_on_report(args: argparse.Namespace) -> list[str]:
    """What a report will not see, one line each."""
    if not captures_iterations(args):
        return []
    steps = args.cuda_graph_warmup_steps
    few = "" if steps > 2 else "; use more than two"
    return [
        "--balance-report sees no times of stages, ranks and layers in a graph of iterations; they are of the "
        f"--cuda-graph-warmup-steps {steps} before it, without the first two of the run{few}"
    ]
