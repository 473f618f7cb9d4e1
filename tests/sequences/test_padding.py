"""Rows of padding change nothing, not even where the embedding of a token that no document has is NaN."""

from typing import Any

import pytest

from tests.sequences.test_packed_documents import PP, SP, Packed
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.training import MOE, RankRun, assert_close, join, watch

UNUSED = 0  # a token
SHORT = "--global-batch-size 8 --train-iters 2 --disable-bias-linear --untie-embeddings-and-output-weights"
ENDS = "--dataloader-inter-document-masking --eod-mask-loss"
DEALT = f"{ENDS} --balance-sequences --sequence-micro-batches"
CP2 = "--context-parallel-size 2"
EXPERTS = f"{' '.join(MOE)} --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"

# model, flags of one rank, ranks, flags of these. In all of them a rank has rows without a token.
LAYOUTS = {
    "PP 2, sequence parallel": ("", "", 4, f"{PP} 2 {SP}"),
    "PP 2, CP 2, per token": ("", "--calculate-per-token-loss", 4, f"{PP} 2 {CP2}"),
    "experts, PP 2, CP 2, EP 2": (EXPERTS, "", 4, f"{PP} 2 {CP2} --expert-model-parallel-size 2 --balance-experts"),
}


def _rank(argv: list[str]) -> tuple[RankRun, int]:
    """Train with an embedding of NaN for the token that no document has. Returns also the rows of padding."""
    import torch
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    from megatron.balanced.sequences.moved_tokens import MovedTokens
    from tests.support.program import parse

    args, config, train = parse(argv)
    finish, padding, models = watch(True), [0], []
    build, read = training.setup_model_and_optimizer, MovedTokens.next_batch

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        models.extend(model for model in unwrap_model(built[0]) if model.pre_process)
        fill(torch.nan)
        return built

    def fill(value: float) -> None:
        for model in models:
            table = model.embedding.word_embeddings
            if table.vocab_start_index <= UNUSED < table.vocab_end_index:
                table.weight.data[UNUSED - table.vocab_start_index] = value

    def next_batch(self: Any, *args: Any, **named: Any) -> Any:
        found = read(self, *args, **named)
        padding[0] += found.inputs["tokens"].shape[1] - found.packed.attention.tokens
        return found

    training.setup_model_and_optimizer = setup_model_and_optimizer
    MovedTokens.next_batch = next_batch
    train(args, config)
    fill(0.0)
    return finish(), padding[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_embedding_of_padding_may_be_nan(pool, tmp_path, name):
    model, alone, ranks, flags = LAYOUTS[name]
    write_documents(tmp_path / "without", heavy_tailed(400, seed=1, low=UNUSED + 1))
    packed = Packed(pool, tmp_path, f"{model} {SHORT}")
    packed.base[packed.base.index(f"{tmp_path / 'documents'}")] = f"{tmp_path / 'without'}"
    found = pool.run(ranks, _rank, packed.from_start(f"{DEALT} {alone} {flags}"))
    assert sum(padding for _, padding in found), "nothing is padded"
    ((reference, _),) = pool.run(1, _rank, packed.from_start(f"{ENDS} {alone}"))
    run = join([run for run, _ in found])
    assert len(run.losses) == 2
    assert_close(run, join([reference]))


def _masked_states() -> None:
    """Mamba's convolution and recurrence beside documents of NaN, and a loss of NaN that does not count."""
    import torch

    from megatron.balanced.local.mamba import _convolve, scan

    draw, tokens = torch.Generator().manual_seed(0), 9
    shapes = {"values": (2, 3), "steps": (2,), "keys": (1, 4), "queries": (1, 4)}
    inputs = {name: torch.randn(1, tokens, *shape, generator=draw) for name, shape in shapes.items()}
    rate, weight = -torch.rand(2, generator=draw), torch.randn(5, 4, generator=draw)
    convolved = torch.randn(1, tokens, 5, generator=draw)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2]])
    mine = documents[0] == 1

    def run(beside: float) -> list[torch.Tensor]:
        leaves = {}
        for name, value in {**inputs, "convolved": convolved}.items():
            value = value.clone()
            value[:, ~mine] = beside
            leaves[name] = value.requires_grad_()
        found = scan(leaves["values"], leaves["steps"], rate, leaves["keys"], leaves["queries"], documents)
        local = _convolve(leaves["convolved"], weight, documents)
        torch.cat([found[:, mine].flatten(), local[:, mine].flatten()]).square().sum().backward()
        return [found[:, mine], local[:, mine], *(leaf.grad[:, mine] for leaf in leaves.values())]

    for one, other in zip(run(torch.nan), run(1.0), strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_a_document_of_nan_stays_in_its_document(pool):
    pool.run(1, _masked_states)


def _rank_without_tokens() -> list[tuple[str, list[int]]]:
    from balancing.cluster import Cluster
    from balancing.sequences import AttentionShape, plan_sequences
    from megatron.balanced.sequences.dataset import _packed_tokens
    from megatron.balanced.sequences.moved_tokens import positions, row_origins

    cluster = Cluster.preset("h200-8x400g").relabel(1, 4)
    plan = plan_sequences([1, 2], cluster, shape=AttentionShape(32, 4, 4, 2, 64))
    (rank,) = (rank for rank in range(4) if not plan.linear_tokens[rank])
    found = _packed_tokens(plan, rank), positions(plan, rank, 2), row_origins(plan, rank, 2, (5, 6))
    return [(str(each.dtype), each.tolist()) for each in found]


def test_a_rank_without_tokens_has_padding_alone(pool):
    (found,) = pool.run(1, _rank_without_tokens)
    assert found == [("int64", []), ("int64", [0, 0]), ("int64", [0, 0])]
