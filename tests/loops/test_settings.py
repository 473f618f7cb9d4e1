"""Settings that adapters take from the environment."""

import pytest

from balancing.experts.config import ExpertConfig
from balancing.sequences.config import SequenceConfig


@pytest.fixture
def choice(pool):
    return lambda text: pool.run(1, _choice, text)[0]


def _choice(text: str | None):
    import os

    from megatron.balanced.loops.choice import VARIABLE, Choice

    os.environ.pop(VARIABLE, None)
    if text is not None:
        os.environ[VARIABLE] = text
    try:
        found = Choice.of_environment()
    except ValueError as error:
        return str(error)
    return found.experts, found.sequences


def test_the_variable_has_settings_and_experts_are_the_default(choice):
    assert choice(None) == (ExpertConfig(enabled=True), None)
    assert choice('{"experts": {"replica_slots": 3}, "sequences": {"domain": "context"}}') == (
        ExpertConfig(enabled=True, replica_slots=3),
        SequenceConfig(enabled=True, domain="context"),
    )


def _differing() -> str:
    import os

    import torch.distributed as dist

    from megatron.balanced.loops.choice import Choice

    dist.init_process_group("gloo")
    choice = Choice(experts=ExpertConfig(enabled=True, late_slots=int(os.environ["RANK"])))
    try:
        choice.around([], None)
    except ValueError as error:
        return str(error)
    return "taken"


def test_ranks_that_have_other_settings_are_refused(pool):
    """They would hang in the first collective that some of them leave out."""
    assert all("set that and MEGATRON_BALANCE alike on all nodes" in line for line in pool.run(2, _differing))


@pytest.mark.parametrize(
    "text, says",
    [
        ("experts", "is not a JSON object of settings, such as"),
        ("{}", "is not a JSON object of settings, such as"),
        ('{"experts": 2}', "is not a JSON object of settings, such as"),
        ('{"layers": {}}', "has 'layers'; its keys are experts and sequences"),
        ('{"experts": {"slots": 2}}', "has a setting of experts that does not exist"),
        ('{"experts": {"replica_slots": -1}}', "replica"),
    ],
)
def test_what_is_no_setting_is_refused_in_one_line(choice, text, says):
    line = choice(text)
    assert says in line and "\n" not in line
