"""Ranks that find the frameworks whose loops are balanced."""

from collections.abc import Iterator

import pytest

from tests.support.packages_apart import why_missing
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def bridge() -> Iterator[Pool]:
    """As `pool`, where Megatron-Bridge and, if it is installed, verl can be imported."""
    for name, title in (("transformer_engine", "Transformer Engine"), ("megatron_bridge", "Megatron-Bridge")):
        if why := why_missing(name, title):
            pytest.skip(why)
    ranks = Pool(before="tests.support.stand_ins.frameworks")
    yield ranks
    ranks.stop()
