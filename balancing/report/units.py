"""Numbers formatted for people: three significant digits and a unit."""

__all__ = ["byte_count", "count", "duration", "ratio", "share"]


def duration(seconds: float) -> str:
    """1.24 s, 61.8 ms, 940 us."""
    if seconds == 0:
        return "0 s"
    for limit, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us")):
        if abs(seconds) >= limit:
            return f"{_digits(seconds * scale)} {unit}"
    raise AssertionError(seconds)


def byte_count(size: float) -> str:
    """23.4 GiB, 512 MiB, 3 B."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{_digits(size / 1024**power)} {unit}"
    return f"{size:.0f} B"


def count(number: float) -> str:
    """812, 12.3 k, 4.56 M, 1.2 G: tokens and query-key pairs."""
    for power, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if number >= 1000**power * (10 if power == 1 else 1):
            return f"{_digits(number / 1000**power)} {unit}"
    return f"{number:.0f}"


def ratio(value: float) -> str:
    """1.31x."""
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def share(value: float) -> str:
    """24 %, 3.1 %: a share from 0 to 1 as a percentage."""
    percent = 100 * value
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or abs(percent) < 0.05 else f"{percent:.1f} %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
