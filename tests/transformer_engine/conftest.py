"""Models to train with Transformer Engine."""

from collections.abc import Callable

import pytest

from tests.support.transformer_engine.model import Model


@pytest.fixture(scope="session")
def model_of(engine, corpus, tmp_path_factory) -> Callable[[str], Model]:
    """A model by its flags, made at its first use."""
    made: dict[str, Model] = {}

    def model(flags: str) -> Model:
        if flags not in made:
            made[flags] = Model(engine, corpus, flags, tmp_path_factory.mktemp("model"))
        return made[flags]

    return model
