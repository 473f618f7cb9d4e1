"""Buckets of equal tokens and equal causal area, filled with pieces of sequences.

A token at position p costs p + 1 query-key pairs. A bucket that must hold t tokens and an area a therefore mixes late
tokens, from the end of a long sequence, with early tokens (whole short sequences, or the beginning of a long one) in
the proportion that gives both. The tokens left for the other buckets then have the right mean as well, so the last
bucket is balanced without further work.

Fewest buckets need the keys of the longest sequences if the ends of these sequences are mixed with the earliest tokens,
so the longest sequence is mixed with the shortest.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from balancing.kernels.pairs import area_between

__all__ = ["TOLERANCE", "Piece", "deal", "even_counts", "joined", "piece_area"]

# Most relative error of a bucket's area from cutting at a multiple of the chunk. Later buckets compensate for it.
TOLERANCE = 0.002

Piece = tuple[int, int, int]  # sequence, start, stop


def deal(
    pieces: Sequence[Piece],
    quotas: Sequence[int],
    chunk: int,
    given: Sequence[Sequence[Piece]] | None = None,
    extra: Sequence[float] | None = None,
) -> list[list[Piece]]:
    """Pieces of each bucket: quotas[i] tokens in bucket i, and the same share of the area as of the tokens.

    A bucket's share of the area is computed from the area that is left, so later buckets compensate for the error of
    earlier ones. The last bucket takes all that is left and has the mean area, up to its own rounding.

    pieces: to distribute.
    chunk: tokens. A bucket takes a multiple of a chunk from a sequence's end, or of half of it where that misses the
        area, and so on.
    given: pieces that each bucket has already, not among `pieces`; they count for its tokens and area. Areas may come
        out unequal if these pieces do not fit together.
    extra: area that each bucket counts besides that of its pieces. Sums may come out unequal if it is large.
    """
    held: Sequence[Sequence[Piece]] = [()] * len(quotas) if given is None else given
    pool = _Pool(pieces)
    tokens = sum(quotas)
    area: float = sum(map(piece_area, [*pieces, *chain.from_iterable(held)]))
    counted: Sequence[float] = [0] * len(quotas) if extra is None else extra
    area += sum(counted)
    dealt: list[list[Piece]] = []
    for quota, own, beside in zip(quotas, held, counted, strict=True):
        missing = quota - sum(stop - start for _, start, stop in own)
        share = area * quota / tokens - sum(map(piece_area, own)) - beside if quota else 0.0
        filled = joined([*own, *_fill(pool, missing, share, chunk)])
        tokens -= quota
        area -= sum(map(piece_area, filled)) + beside
        dealt.append(filled)
    assert not pool.cut and pool.low == pool.high, "pieces are left over"
    return dealt


def even_counts(tokens: int, ranks: int, first: int) -> list[int]:
    """Tokens of each rank; the remainder goes to rank `first` and the ranks after it, one each, cyclically."""
    base, more = divmod(tokens, ranks)
    return [base + ((rank - first) % ranks < more) for rank in range(ranks)]


def piece_area(piece: Piece) -> int:
    """Query-key pairs of a piece's tokens."""
    return area_between(piece[1], piece[2])


def joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces sorted by sequence and start, adjacent ones merged."""
    merged: list[Piece] = []
    for sequence, start, stop in sorted(pieces):
        if merged and merged[-1][0] == sequence and merged[-1][2] == start:
            merged[-1] = sequence, merged[-1][1], stop
        else:
            merged.append((sequence, start, stop))
    return merged


@dataclass(eq=False)
class _Rest:
    """Tokens [start, stop) of one sequence that no bucket has yet. Buckets take from both ends."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def area(self) -> int:
        return area_between(self.start, self.stop)

    def first(self, tokens: int) -> int:
        """Area of the first `tokens` tokens."""
        return area_between(self.start, self.start + tokens)

    def last(self, tokens: int) -> int:
        """Area of the last `tokens` tokens."""
        return area_between(self.stop - tokens, self.stop)

    def price(self, tokens: int) -> int:
        """Twice the mean area of the first `tokens` tokens, less a constant; for comparisons."""
        return 2 * self.start + min(tokens, self.tokens)

    def worth(self, tokens: int) -> int:
        """As `price`, of the last `tokens` tokens."""
        return 2 * self.stop - min(tokens, self.tokens)

    def take(self, first: int, last: int) -> list[Piece]:
        """Remove the first `first` and the last `last` tokens and return them as pieces."""
        start, stop = self.start, self.stop
        self.start, self.stop = start + first, stop - last
        pieces = ((self.sequence, start, self.start), (self.sequence, self.stop, stop))
        return [piece for piece in pieces if piece[1] < piece[2]]


class _Pool:
    """Tokens that no bucket has yet.

    order[low:high]: whole sequences, or pieces that begin at token 0, shortest first.
    cut: the other pieces, and rests of sequences that buckets have taken from.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        whole = sorted((stop, sequence) for sequence, start, stop in pieces if not start)
        self.order = [sequence for _, sequence in whole]
        self.lengths = [length for length, _ in whole]
        self.tokens_to = [0, *accumulate(self.lengths)]
        self.area_to = [0, *accumulate(area_between(0, length) for length in self.lengths)]
        self.low, self.high = 0, len(whole)
        self.cut = [_Rest(*piece) for piece in pieces if piece[1]]

    def shortest(self) -> _Rest:
        """Move the shortest whole sequence to `cut` and return it."""
        self.low += 1
        return self._opened(self.low - 1)

    def longest(self) -> _Rest:
        """Move the longest whole sequence to `cut` and return it."""
        self.high -= 1
        return self._opened(self.high)

    def latest(self, tokens: int, area: float) -> _Rest:
        """The cut sequence whose last `tokens` tokens have most area.

        The longest whole sequence instead if it ends later and the cut sequence, filled up to `tokens` tokens from
        another sequence, has less than `area`.
        """
        rest = max(self.cut, key=lambda rest: rest.worth(tokens), default=None)
        if self.low == self.high:
            assert rest is not None, "the pool is empty before the last bucket is full"
            return rest
        longest = self.lengths[self.high - 1]
        if rest is None:
            return self.longest()
        if longest <= rest.stop:
            return rest
        missing = max(0, tokens - rest.tokens)
        others = [other.last(missing) for other in self.cut if other is not rest and other.tokens >= missing]
        more = max([area_between(longest - missing, longest) if missing <= longest else area, *others])
        return self.longest() if rest.last(tokens - missing) + more < area else rest

    def earliest(self, but: _Rest, tokens: int, area: float) -> _Rest | None:
        """The cut sequence other than `but` whose first `tokens` tokens have least area.

        The shortest whole sequence instead if that area is too large.
        """
        rest = min((rest for rest in self.cut if rest is not but), key=lambda rest: rest.price(tokens), default=None)
        if rest is not None:
            taken = min(tokens, rest.tokens)
            if area - rest.first(taken) >= self.least_area(tokens - taken, rest):
                return rest
        return self.shortest() if self.low < self.high else rest

    def least_area(self, tokens: int, but: _Rest) -> float:
        """The least area of `tokens` tokens outside of `but`: of the beginning of one cut sequence, or of whole
        sequences, shortest first, and the beginning of the next one."""
        most = self.tokens_to[self.low] + tokens
        end = min(bisect_right(self.tokens_to, most) - 1, self.high)
        area, missing = self.area_to[end] - self.area_to[self.low], most - self.tokens_to[end]
        if end < self.high:
            area, missing = area + area_between(0, missing), 0
        for rest in sorted((rest for rest in self.cut if rest is not but), key=lambda rest: rest.price(tokens)):
            if rest.tokens >= tokens:
                area = min(area, rest.first(tokens)) if not missing else area
            if missing:
                taken = min(missing, rest.tokens)
                area, missing = area + rest.first(taken), missing - taken
        return area

    def take_shortest(self, late: _Rest, tokens: int, area: float) -> list[Piece]:
        """Whole sequences, shortest first, as long as the end of `late` can still provide the missing area."""
        taken: list[Piece] = []
        while self.low < self.high:
            length = self.lengths[self.low]
            tokens, area = tokens - length, area - area_between(0, length)
            if tokens < 0 or (tokens <= late.tokens and late.last(tokens) < area):
                break
            taken.append((self.order[self.low], 0, length))
            self.low += 1
        return taken

    def drop(self, rest: _Rest) -> None:
        if not rest.tokens:
            self.cut.remove(rest)

    def _opened(self, place: int) -> _Rest:
        rest = _Rest(self.order[place], 0, self.lengths[place])
        self.cut.append(rest)
        return rest


def _fill(pool: _Pool, tokens: int, area: float, chunk: int) -> list[Piece]:
    """Pieces of one bucket with `tokens` tokens and about `area` query-key pairs, taken out of the pool.

    Invariant: the tokens and the area that the bucket still misses can both be met. As many of the earliest tokens of
    the pool have at most the missing area (`least_area`), and as many of its latest tokens, the end of `late`, have at
    least that. The invariant holds at the beginning, since the bucket and the pool have the same mean. Each case keeps
    it; the first that applies is taken:

    - all of `late`, if the rest can be filled with early tokens of little enough area;
    - short whole sequences, as long as the end of `late` provides the area that they lack;
    - the beginning and the end of `late`, in the proportion that gives the area: the bucket is full;
    - the beginning of `early` and the end of `late`, in the proportion that gives the area: the bucket is full;
    - all of `early`, if it has too few tokens or too little area for the case before.

    If only `late` is left, the bucket gets its beginning.
    """
    filled: list[Piece] = []
    tolerance = TOLERANCE * area
    while tokens:
        late = pool.latest(tokens, area)
        early: _Rest | None = None
        if late.tokens <= tokens and area - late.area >= pool.least_area(tokens - late.tokens, late):
            taken = late.take(0, late.tokens)
        elif short := pool.take_shortest(late, tokens, area):
            taken = short
        elif late.tokens >= tokens and late.first(tokens) <= area:
            taken = late.take(*_ends(late, late, tokens, area, chunk, tolerance))
        elif (early := pool.earliest(late, tokens, area)) is None:
            taken = late.take(min(tokens, late.tokens), 0)
        elif _suffice(early, late, tokens, area):
            first, last = _ends(early, late, tokens, area, chunk, tolerance)
            taken = early.take(first, 0) + late.take(0, last)
        else:
            taken = early.take(early.tokens, 0)
        for rest in (early, late):
            if rest is not None:
                pool.drop(rest)
        for _, start, stop in taken:
            tokens, area = tokens - (stop - start), area - area_between(start, stop)
        filled += taken
    return filled


def _suffice(early: _Rest, late: _Rest, tokens: int, area: float) -> bool:
    """Whether the beginning of `early` and the end of `late` can give `tokens` tokens together within `area`."""
    missing = max(0, tokens - early.tokens)  # if all of `early` is taken
    return missing <= late.tokens and (not missing or late.last(missing) + early.area <= area)


def _ends(early: _Rest, late: _Rest, tokens: int, area: float, chunk: int, tolerance: float) -> tuple[int, int]:
    """Tokens to take from the beginning of `early` and from the end of `late`: together `tokens` of about `area`."""
    least, most = (0 if early is late else max(0, tokens - early.tokens)), min(tokens, late.tokens)
    # The area is linear in the tokens from the end: one more from the end and one less from the beginning adds `step`.
    step = late.stop - early.start - tokens
    exact = (area - early.first(tokens)) / step if step > 0 else least
    exact = min(max(exact, least), most)
    while chunk > 1:
        last = round(exact / chunk) * chunk
        if least <= last <= most and abs(last - exact) * step <= tolerance:
            return tokens - last, last
        chunk //= 2
    return tokens - round(exact), round(exact)
