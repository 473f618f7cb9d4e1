"""Parser of network rates: 25MB/s, 200Mbit/s, 1GB/s."""

import re

__all__ = ["format_rate", "parse_rate"]

_PREFIX = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_UNIT = {"B/s": 1.0, "bit/s": 1 / 8, "b/s": 1 / 8, "bps": 1 / 8}
_RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(Ki|Mi|Gi|[kKMGT]?)(B/s|bit/s|b/s|bps)")
_SLOWEST = 1e5  # bytes/s; slower than this the bucket's least burst, two packets, lets whole messages through


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as 25MB/s, 200Mbit/s, 1.5Gbps or 64MiB/s.

    B is a byte, b and bit are a bit; prefixes are decimal, with an i binary. Raises ValueError for anything else, and
    for rates below 100 kB/s.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a network rate; write for example 25MB/s (bytes), 200Mbit/s (bits) or 1GB/s")
    number, prefix, unit = match.groups()
    rate = float(number) * _PREFIX[prefix] * _UNIT[unit]
    if rate < _SLOWEST:
        raise ValueError(f"'{text}' is too slow for a network card; use at least 100kB/s")
    return rate


def format_rate(rate: float) -> str:
    """A rate in bytes/s as text, for example 25 MB/s."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= size:
            return f"{rate / size:.4g} {prefix}B/s"
    return f"{rate:.4g} B/s"
