"""Exposed messages of experts: those that no computation hides, with `--overlap-moe-expert-parallel-comm`.

With this flag the dispatch and the combine of a layer run beside computation of another micro-batch. Only the part of a
message during which its rank computes nothing makes the step longer: this part is exposed. It counts for the layer of
the message and moves with the layer.

A pass that runs alone, in warm-up and cool-down, hides nothing. The first stages have more of these passes, so an
average over all passes would make their layers look expensive. Therefore only passes that alternated with a pass of
another micro-batch count, if there are any.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from balancing.report.record import Span

__all__ = ["exposed_seconds", "exposed_spans"]

_PHASES = {"forward": 0, "backward": 1}


def exposed_spans(messages: Sequence[Span], computed: Sequence[tuple[float, float]]) -> list[Span]:
    """The exposed part of messages of layers: one span, "forward-exposed" or "backward-exposed", for each pass that has
    any. It has no device seconds, and ends with the last exposed message of its pass.

    messages: the messages of kind "forward" or "backward"; they start when all data to send are ready.
    computed: (start, seconds) of each piece of computation of the rank. Pieces do not overlap.
    """
    if not messages:
        return []
    starts, seconds = np.array(sorted(computed), dtype=float).reshape(-1, 2).T
    edges = np.stack([starts, starts + seconds], axis=1).reshape(-1)
    until = np.concatenate([[0.0], np.repeat(np.cumsum(seconds), 2)])[:-1]  # computed until each edge
    begin = np.array([message.start for message in messages])
    end = begin + np.array([message.seconds for message in messages])
    hidden = np.interp(end, edges, until) - np.interp(begin, edges, until) if len(edges) else 0.0
    found: dict[tuple[str, int | str, int, int], tuple[float, float]] = {}  # end and seconds of each pass
    for message, last, exposed in zip(messages, end, end - begin - hidden, strict=True):
        if exposed > 1e-9:
            of = f"{message.kind}-exposed", message.layer, message.chunk, message.micro_batch
            found[of] = float(last), found.get(of, (0.0, 0.0))[1] + float(exposed)
    return [Span(*of, last - seconds, seconds, 0.0) for of, (last, seconds) in found.items()]


def exposed_seconds(spans: Iterable[Span]) -> dict[tuple[int | str, int], float]:
    """(layer, phase) -> exposed seconds per micro-batch; phase 0 is forward, 1 is backward.

    spans: of one rank in one iteration. A pass of the stage that alternated with another pass has several spans.
    """
    exposed = [span for span in spans if span.kind.endswith("-exposed")]
    if not exposed:
        return {}
    runs = Counter(
        (span.kind.removesuffix("-step"), span.chunk, span.micro_batch) for span in spans if span.kind.endswith("-step")
    )
    in_turn = Counter(key[:2] for key, parts in runs.items() if parts > 1)
    every = Counter(key[:2] for key in runs)
    found: dict[tuple[int | str, int], float] = {}
    for span in exposed:
        kind = span.kind.removesuffix("-exposed")
        if (kind, span.chunk) in in_turn and runs[kind, span.chunk, span.micro_batch] < 2:
            continue
        passes = in_turn[kind, span.chunk] or every[kind, span.chunk]
        at = span.layer, _PHASES[kind]
        found[at] = found.get(at, 0.0) + span.seconds / passes
    return found
