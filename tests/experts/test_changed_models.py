"""Experts that a loop has changed, frozen or adapted have replicas and train the same model, or are refused by name."""

import itertools

import pytest

from tests.support.changed_loop import RANKS, SAMPLES, SEQUENCE, Ended, build, compare, train
from tests.support.changed_models import CHANGES, EXPERTS_REFUSED
from tests.support.sampled import sampled


def _train(name: str, balanced: bool, shared: bool) -> Ended:
    return train(CHANGES[name], balanced, shared)


@pytest.mark.parametrize(
    "name, shared", sampled(itertools.product(CHANGES, (False, True)), *((name, name[0] in "ap") for name in CHANGES))
)
def test_changed_experts_have_replicas_and_train_the_same(pool, name, shared):
    found, plain = (pool.run(RANKS, _train, name, on, shared) for on in (True, False))
    compare(found, plain)
    weights, gradients = (sum(sent[kind] for rank in found for sent in rank.sent) for kind in (0, 1))
    assert weights > 0
    if name in ("frozen", "adapters of attention"):
        assert gradients == 0, "gradients of experts that do not train were sent"
    elif name in ("adapters", "adapters of experts"):
        assert 0 < gradients < weights / 2, "gradients of frozen weights were sent"
    else:
        assert gradients > 0


def _refused(name: str) -> tuple[str, list[str]]:
    """What is refused, and the classes of the MoE layers then."""
    from megatron.balanced.loop import ExpertBalancer
    from megatron.balanced.shared.job import Job

    change, expected = EXPERTS_REFUSED[name]
    model = build(change, overlap=False)
    with pytest.raises(ValueError) as error:
        ExpertBalancer([model], job=Job(SEQUENCE, SAMPLES, 5))
    assert expected in str(error.value), str(error.value)
    return str(error.value), [
        type(module).__name__ for module in model.modules() if hasattr(module, "token_dispatcher")
    ]


@pytest.mark.parametrize("name", EXPERTS_REFUSED)
def test_what_a_replica_would_not_have_is_refused_by_name(pool, name):
    told = pool.run(2, _refused, name)
    assert len({message for message, _ in told}) == 1, "ranks were told different reasons"
    message, classes = told[0]
    assert "; " in message and "\n" not in message
    assert classes == ["MoELayer"] * 3, "the model is not plain any more"


def _compiled_twin() -> bool:
    import torch

    from megatron.balanced.experts.twins import twin_of

    home, rows = torch.nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    home.compile(backend="eager")
    twin = twin_of(home, _parameters={"weight": torch.nn.Parameter(2 * home.weight), "bias": None})
    return torch.equal(twin(rows), 2 * home(rows))


def test_a_replica_of_a_compiled_expert_has_its_own_weights(pool):
    assert pool.run(1, _compiled_twin) == [True]
