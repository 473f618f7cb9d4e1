"""Ranks that have Transformer Engine's own Python over the stand-in for its C++ module, and models to train on them."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.packages_apart import why_missing
from tests.support.pool import Pool
from tests.support.transformer_engine.model import Model


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """As `pool`, where Megatron-LM finds Transformer Engine."""
    if why := why_missing("transformer_engine", "Transformer Engine"):
        pytest.skip(why)
    workers = Pool(pauses=request.config.getoption("--pauses"), before="tests.support.transformer_engine")
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def model_of(engine, corpus, tmp_path_factory) -> Callable[[str], Model]:
    """A model by its flags, made at its first use."""
    made: dict[str, Model] = {}

    def model(flags: str) -> Model:
        if flags not in made:
            made[flags] = Model(engine, corpus, flags, tmp_path_factory.mktemp("model"))
        return made[flags]

    return model
