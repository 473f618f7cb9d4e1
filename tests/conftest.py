"""Fixtures, options and limits of all tests: the pool of gloo ranks, a corpus, a time limit for each."""

import faulthandler
import pkgutil
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.replaced import replace_name
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.packages_apart import why_missing
from tests.support.patience import PATIENCE
from tests.support.pool import Pool
from tests.support.tiers import is_thorough

DEFAULT_SECONDS = 3 * PATIENCE
_BEGIN = time.monotonic()
MORE = 1.3  # times the minutes of the second tier: those of the first one
SHARE = 8  # of so many tests that only --exhaustive runs, --sample runs one
TURNS = 12  # days in which --sample, whose seed is a day, runs all tests that take turns
# The files of a scope are one worker's, since starting the ranks of `engine` and of `bridge` takes long.
SCOPES = (
    ("tests/transformer_engine/",),
    ("tests/loops/test_bridge.py", "tests/loops/test_page.py", "tests/loops/test_verl.py"),
)

# Neither an example nor making one may take long by default, on a machine that may be busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="every combination, where usually a sample that covers all pairs runs"
    )
    parser.addoption(
        "--sample",
        metavar="SEED",
        type=int,
        help="of what --exhaustive adds the fifth that SEED draws, as CI does with a new one",
    )
    parser.addoption(
        "--minutes",
        type=float,
        help="the first tier, then the files of the second one in an order that --sample draws. After so many minutes "
        f"no test of the second tier begins, after {MORE} times as many none of the first. What had no turn says so",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): the time limit of a test, {DEFAULT_SECONDS:.0f} s by default")
    config.addinivalue_line(
        "markers", "thorough: `scripts/test.sh` alone leaves it out, `scripts/test.sh --all` runs it"
    )
    config.addinivalue_line(
        "markers",
        "exhaustive: runs with --exhaustive, and by chance with --sample; of those with `turn=` one of "
        f"{TURNS} in a row runs, another one with the next seed",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [] if config.getoption("--exhaustive") else [item for item in items if _left_out(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    thorough = {item.path for item in items if is_thorough(item.path.parent.name, item.path.stem)}
    for item in items:
        if item.path in thorough:
            item.add_marker(pytest.mark.thorough)
    # What takes longest first, so that no worker is left with it alone at the end: a scope of several files, then files
    # whose tests start ranks, and those of the second tier, which start other processes.
    files = {item.path for item in items if {"pool", "engine", "muon"} & set(getattr(item, "fixturenames", ()))}
    files |= thorough
    seed = f"{config.getoption('sample')} "

    def turn(item: pytest.Item) -> int:
        return zlib.crc32((seed + (_scope(item.nodeid) or item.nodeid.partition("::")[0])).encode())

    if config.getoption("minutes") is None:
        items.sort(key=lambda item: (_scope(item.nodeid) is None, item.path not in files))
    else:
        items.sort(
            key=lambda item: (item.path not in files, turn(item)) if item.path not in thorough else (2, turn(item))
        )


def _scope(nodeid: str) -> str | None:
    """Of SCOPES the one that a test is of."""
    return next((scope[0] for scope in SCOPES if nodeid.startswith(scope)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: a file is one worker's, and so are the files of one of SCOPES."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid) or super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _left_out(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether this run leaves out a test that `--exhaustive` would run. All workers decide alike."""
    marker, seed = item.get_closest_marker("exhaustive"), config.getoption("--sample")
    if marker is None or seed is None:
        return marker is not None
    if (turn := marker.kwargs.get("turn")) is not None:
        return (seed + turn) % TURNS != 0
    file, *_ = item.nodeid.partition("::")
    # Tests of a file with the same parameters have runs in common, and are drawn together.
    drawn = f"{file} {item.callspec.id}" if hasattr(item, "callspec") else item.nodeid
    return zlib.crc32(f"{seed} {drawn}".encode()) % SHARE != 0


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As pytest's, but what replaces a function that may change, one outside of the standard library, has to take the
    calls of the function."""
    put = monkeypatch.setattr

    def replace(target: Any, name: Any, *value: Any) -> None:
        if not value:
            (path, _, name), value = target.rpartition("."), (name,)
            target = pkgutil.resolve_name(path)
        home = getattr(target, "__module__", None) or getattr(target, "__name__", "")
        if home.partition(".")[0] in sys.stdlib_module_names:
            put(target, name, *value)
        else:
            replace_name(target, name, *value, put=put)

    monkeypatch.setattr = replace  # type: ignore[method-assign]
    return monkeypatch


def _ranks(before: str | None = None) -> Iterator[Pool]:
    workers = Pool(before=before)
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    yield from _ranks()


@pytest.fixture(scope="session")
def engine() -> Iterator[Pool]:
    """As `pool`, where Megatron-LM finds Transformer Engine's own Python over a stand-in for its C++ module."""
    if why := why_missing("transformer_engine", "Transformer Engine"):
        pytest.skip(why)
    yield from _ranks("tests.support.transformer_engine")


@pytest.fixture(scope="session")
def muon() -> Iterator[Pool]:
    """As `pool`, where Megatron-LM finds NVIDIA's emerging optimizers."""
    if why := why_missing("emerging_optimizers", "emerging-optimizers"):
        pytest.skip(why)
    yield from _ranks("tests.support.stand_ins.muon")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that train on a few hundred documents of heavy-tailed length."""
    return write_documents(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed(400))


@contextmanager
def _limit(item: pytest.Item) -> Iterator[None]:
    """Raise in the test when its time is over; where Python cannot raise, show all stacks and end the run."""
    marker = item.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else DEFAULT_SECONDS

    def over(*unused: object) -> None:
        raise TimeoutError(f"{item.nodeid} did not end within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    minutes = item.config.getoption("minutes")
    if minutes is not None:
        most = minutes if item.get_closest_marker("thorough") else MORE * minutes
        if time.monotonic() - _BEGIN > 60 * most:
            pytest.skip(f"had no turn in {most:g} minutes")
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limit(item):
        return (yield)
