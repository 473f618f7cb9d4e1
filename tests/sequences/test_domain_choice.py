"""The domain that `--sequence-domain auto` takes: the quicker one by the cost model, on every rank the same."""

import os

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape
from balancing.sequences.domain_choice import WORTH, DomainChoice, DrawnSteps, choose_domain
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.training import MOCK_DATA, MODEL

SHAPE = AttentionShape(hidden=4096, heads=32, kv_heads=8, layers=32, ffn_hidden=14336)
LONG, SHORT = 131072, 8192


def _samples(distribution: str, tokens: int) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(1)
    return [draw_batch(distribution, tokens, generator) for _ in range(64)]


def _choice(
    samples: list[tuple[int, ...]], ranks: int, data_ranks: int, machine: Cluster | None = None, **job
) -> DomainChoice:
    machine = machine or Cluster.sheet("h200-8x400g")
    every = ranks * data_ranks
    context, domain = machine.relabel(1, ranks), machine.relabel(max(1, every // 8), min(8, every))
    return choose_domain(DrawnSteps(samples, **job), context, domain, shape=SHAPE)


@pytest.mark.parametrize("distribution", ["prolong", "pretrain", "packed", "wikipedia", "web", "mix"])
def test_long_samples_of_uneven_documents_share_their_micro_batches(distribution):
    """The rank with the longest documents keeps 31 others waiting; attention hides the longer exchange."""
    found = _choice(_samples(distribution, LONG), 2, 32, micro_batches=4)
    assert found.domain == "data"
    assert found.data_seconds < 0.9 * found.context_seconds


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_short_samples_stay_apart(distribution):
    """Linear layers, which are level in both, are most of their work, and a wider domain has more launches."""
    assert _choice(_samples(distribution, SHORT), 8, 8, micro_batches=8).domain == "context"


def test_documents_that_are_alike_stay_apart():
    found = _choice([(LONG // 4,) * 4] * 8, 2, 16, micro_batches=4)
    assert found.domain == "context"
    assert found.data_seconds >= (1 - WORTH) * found.context_seconds


def test_slow_links_between_nodes_keep_domains_narrow():
    samples, fast = _samples("pretrain", LONG), Cluster.sheet("h200-8x400g")
    slow = Cluster(**{**vars(fast), "nic_bandwidth": fast.nic_bandwidth / 100})
    assert _choice(samples, 2, 32, fast, micro_batches=4).domain == "data"
    assert _choice(samples, 2, 32, slow, micro_batches=4).domain == "context"


def test_many_micro_batches_level_ranks_and_experts_do_not_wait_for_that():
    """Ranks that meet once a step have the sum of their micro-batches, and those of an expert-parallel group meet in
    each."""
    samples = _samples("packed", LONG)
    few, many, meeting = (
        _choice(samples, 2, 32, micro_batches=count, waiting=waiting) for count, waiting in ((2, 1), (32, 1), (32, 16))
    )
    ratios = [found.data_seconds / found.context_seconds for found in (few, many, meeting)]
    assert ratios[0] < ratios[1] and ratios[2] < ratios[1]


def test_a_choice_is_always_the_same():
    samples = _samples("web", LONG)
    assert _choice(samples, 4, 4) == _choice(list(samples), 4, 4)


def test_very_wide_domains_are_chosen_by_a_part_of_them():
    """16,384 ranks are not planned at start-up."""
    found = _choice(_samples("packed", LONG), 4, 4096, micro_batches=4)
    assert found.domain == "data"
    narrower = _choice(_samples("packed", LONG), 4, 128, micro_batches=4)
    assert found.data_seconds == pytest.approx(narrower.data_seconds, rel=0.05)


def test_groups_smaller_than_a_node_are_planned():
    """A rack of 72 GPUs is one node; a domain of two racks consists of groups of 36."""
    machine = Cluster.sheet("h200-8x400g").relabel(2, 72)
    steps = DrawnSteps(_samples("packed", LONG), micro_batches=4)
    found = choose_domain(steps, machine.relabel(1, 1), machine, shape=SHAPE)
    assert found.domain == "data" and found.data_seconds < 0.9 * found.context_seconds


def test_what_cannot_be_chosen_by():
    with pytest.raises(ValueError, match="no samples"):
        _choice([], 2, 4)
    machine = Cluster.sheet("h200-8x400g")
    with pytest.raises(ValueError, match="6 ranks are no multiple of 4"):
        choose_domain(DrawnSteps([(64,)]), machine.relabel(1, 4), machine.relabel(1, 6), shape=SHAPE)


# From the index of a training set.


def _settled(argv: list[str], prefix: str) -> tuple[str, str, list[tuple[int, ...]] | None, list[list[int]]]:
    """The domain, what is said of it, the lengths that it is chosen by; on rank 0, lengths of the training set."""
    import contextlib
    import io

    from megatron.balanced.trainer.arguments import parse_arguments

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        args, config = parse_arguments(argv)

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset

    from megatron.balanced.sequences.dataset import document_lengths
    from megatron.balanced.trainer.auto_domain import sample_lengths
    from megatron.balanced.trainer.data import _dataset_config

    notes = [line for line in said.getvalue().splitlines() if "--sequence-domain auto" in line]
    drawn = []
    if prefix and os.environ["RANK"] == "0":  # ranks without a group would write the index over each other's reading
        dataset, *_ = BlendedMegatronDatasetBuilder(
            GPTDataset, [400, 0, 0], lambda: True, _dataset_config(args)
        ).build()
        drawn = [document_lengths(dataset, index) for index in range(400)]
    return config.sequences.domain, "".join(notes), sample_lengths(args), drawn


BASE = [*MODEL, *"--attention-dropout 0 --dataloader-inter-document-masking --balance-sequences".split()]
BASE += ["--context-parallel-size", "2"]


def test_the_index_of_the_training_set_decides(pool, tmp_path):
    """On all ranks alike, by samples like those of the training set; the host is what small models wait for."""
    data = write_documents(tmp_path / "documents", heavy_tailed(3000, seed=1))
    cache = ["--data-cache-path", str(tmp_path / "cache")]
    ranks = pool.run(4, _settled, [*BASE, *data, *cache], "documents")
    domain, note, lengths, drawn = ranks[0]
    assert domain == "context" and "the cost model predicts steps" in note and not ranks[1][1]
    assert all(other[0] == domain and other[2] == lengths for other in ranks)
    assert all(sum(sample) == 32 for sample in lengths)
    for moment in (0, 2):  # documents of a sample, and pairs of their tokens
        ours, theirs = (np.mean([sum(n**moment for n in sample) for sample in each]) for each in (lengths, drawn))
        assert ours == pytest.approx(theirs, rel=0.1)


# flags, and why the domain follows from a rule
RULES = {
    "lengths unknown": ("", "not known before training"),
    "one document a sample": ("", "all samples cost the same"),
    "refused for data": ("--dataloader-type cyclic", "--dataloader-type cyclic"),
}


@pytest.mark.parametrize("case", RULES)
def test_where_a_rule_decides(pool, case):
    flags, why = RULES[case]
    argv = [*BASE, *MOCK_DATA, *flags.split()]
    if case == "one document a sample":
        argv.remove("--dataloader-inter-document-masking")
    domain, note, *_ = pool.run(4, _settled, argv, "")[0]
    assert domain == "context" and "--sequence-domain auto is context: " in note and why in note
