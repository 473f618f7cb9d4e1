"""The pattern of a hybrid model, Megatron-LM's --hybrid-layer-pattern: a symbol for the kind of each layer.

| separates pipeline segments. A stage has one segment, or several in an interleaved pipeline. After each / come the
layers of one depth of multi-token prediction. "M-M-|M*ME/*E" is two segments of four layers, and one depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from balancing.pipeline.stage_plan import StagePlan

__all__ = ["KINDS", "Pattern", "read_pattern"]

# Symbol -> name of the kind of layer.
KINDS = {
    "M": "Mamba",
    "G": "gated delta net",
    "*": "attention",
    "D": "sparse attention",
    "+": "latent attention",
    "-": "MLP",
    "E": "MoE",
}
_ATTENTION = "*+D"


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    symbols: one symbol for each layer.
    segments: number of layers of each pipeline segment. The layers of a single segment are spread evenly over stages.
    prediction: symbols of the layers of one depth of multi-token prediction.
    depths: number of depths of multi-token prediction.
    """

    symbols: str
    segments: tuple[int, ...]
    prediction: str = ""
    depths: int = 0

    @property
    def attention(self) -> tuple[int, ...]:
        """The layers with attention, from 0."""
        return self._of(_ATTENTION)

    @property
    def experts(self) -> tuple[int, ...]:
        """The layers with experts, from 0."""
        return self._of("E")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer, by name."""
        return tuple(KINDS[symbol] for symbol in self.symbols)

    @classmethod
    def from_kinds(cls, kinds: Sequence[str]) -> "Pattern | None":
        """The pattern of layers of these kinds, as one segment; None if a kind is not in `KINDS`."""
        symbols = {kind: symbol for symbol, kind in KINDS.items()}
        if not all(kind in symbols for kind in kinds):
            return None
        return cls("".join(symbols[kind] for kind in kinds), (len(kinds),))

    def _of(self, symbols: str) -> tuple[int, ...]:
        return tuple(number for number, symbol in enumerate(self.symbols) if symbol in symbols)

    def has(self, symbol: str) -> bool:
        """Whether a layer of the model or of multi-token prediction is of this kind."""
        return symbol in self.symbols + self.prediction

    def has_layers_of(self, other: "Pattern") -> bool:
        """Whether the two differ at most in their segments."""
        return replace(self, segments=()) == replace(other, segments=())

    def plan(self, stages: int, *, first: int | None = None, last: int | None = None) -> StagePlan:
        """The layers of each stage, as Megatron-LM places them.

        first, last: number of layers of the first and the last stage if the pattern has one segment; None if they have
            as many as the others.

        Raises ValueError if the number of segments or layers is no multiple of the stages.
        """
        segments = self.segments
        if len(segments) == 1 and stages > 1:
            segments = self._spread(stages, first, last)
        if len(segments) % stages:
            raise ValueError(
                f"--hybrid-layer-pattern {self.text()} has {len(segments)} segments, which {stages} pipeline stages "
                "do not divide; add or remove a |"
            )
        return replace(StagePlan.from_bounds((0, *accumulate(segments)), stages), tail_layers=self.depths)

    def _spread(self, stages: int, first: int | None, last: int | None) -> tuple[int, ...]:
        """Number of layers of each stage, for a pattern of one segment."""
        inner = stages - sum(end is not None for end in (first, last))
        left = len(self.symbols) - (first or 0) - (last or 0)
        if left < 0 or (left % inner if inner else left):
            raise ValueError(
                f"--hybrid-layer-pattern {self.text()} has {len(self.symbols)} layers, of which {left} do not divide "
                f"by {inner} pipeline stages; give the segments of the stages with |"
            )
        sizes = [left // max(inner, 1)] * stages
        for at, end in ((0, first), (-1, last)):
            if end is not None:
                sizes[at] = end
        return tuple(sizes)

    def text(self, plan: StagePlan | None = None) -> str:
        """The pattern as a string, with the segments of `plan` if a plan is given."""
        segments = self.segments if plan is None else [len(chunk) for chunk in plan.order]
        bounds = (0, *accumulate(segments))
        parts = [self.symbols[start : start + size] for start, size in zip(bounds, segments, strict=False)]
        return "|".join(parts) + f"/{self.prediction}" * self.depths


def read_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises ValueError, one line, for a pattern that Megatron-LM does not accept."""
    main, *predictions = text.split("/")
    if odd := sorted({*text} - {*KINDS, "|", "/"}):
        known = ", ".join(f"{symbol} ({kind})" for symbol, kind in KINDS.items())
        raise ValueError(f"--hybrid-layer-pattern {text} has {odd[0]!r}, which is no kind of layer; known: {known}")
    symbols = main.replace("|", "")
    if not symbols:
        raise ValueError(f"--hybrid-layer-pattern {text!r} has no layer; give a symbol for each")
    for where in (main, *predictions):
        if "*" in where and ("+" in where or "D" in where):
            raise ValueError(
                f"--hybrid-layer-pattern {text} has attention (*) beside latent attention (+ or D); use one of them"
            )
    if any("|" in each for each in predictions):
        raise ValueError(
            f"--hybrid-layer-pattern {text} has | after /, but multi-token prediction is not divided over stages; "
            "remove that |"
        )
    if any(not each for each in predictions):
        raise ValueError(f"--hybrid-layer-pattern {text} has a / without layers after it; add layers or remove the /")
    if len({*predictions}) > 1:
        raise ValueError(
            f"--hybrid-layer-pattern {text} has depths of {' and '.join(predictions)}; all depths must be the same"
        )
    segments = tuple(map(len, main.split("|")))
    return Pattern(symbols, segments, predictions[0] if predictions else "", len(predictions))
