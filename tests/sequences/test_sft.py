"""--sft: conversations packed into sequences, with Megatron's own dataset and tokenizer, in every layout."""

import json
import os
from itertools import chain
from pathlib import Path

import pytest

from tests.support.pool import Pool
from tests.support.training import EXACT, MODEL, RankRun, Run, differences, join, train_rank

pytest.importorskip("datasets", reason="--sft reads conversations with the datasets package, which is not installed")
pytest.importorskip("transformers", reason="--sft needs a Hugging Face tokenizer, and transformers is not installed")

ROLES = ("system", "user", "assistant")
CONVERSATIONS = [
    ("be brief", "two and two?", "four"),
    ("be kind", "hello", "hello, good to see you"),
    ("be brief", "a colour?", "blue"),
    ("rhyme", "a cat", "sat on a mat"),
    ("be brief", "first month?", "january"),
    ("answer", "the sea?", "deep and wide"),
    ("be brief", "up or down?", "up"),
    ("count", "three", "one, two, three"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level tokenizer with the special tokens that the prompt format names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


def _write(path: Path, conversations_per_line: int) -> Path:
    messages = [
        [{"role": role, "content": content} for role, content in zip(ROLES, conversation, strict=True)]
        for conversation in CONVERSATIONS
    ]
    lines = [messages[i : i + conversations_per_line] for i in range(0, len(messages), conversations_per_line)]
    path.write_text("".join(json.dumps({"messages": list(chain(*line))}) + "\n" for line in lines))
    return path


def _base(tokenizer: Path, data: Path) -> list[str]:
    flags = "--sft --sft-tokenizer-prompt-format nemotron-nano-v2 --tokenizer-type SFTTokenizer --split 100,0,0"
    size = "--seq-length 256 --max-position-embeddings 256 --init-method-std 0.1 --calculate-per-token-loss"
    files = ["--tokenizer-model", str(tokenizer), "--data-path", str(data)]
    return [*MODEL, *flags.split(), *size.split(), *EXACT, *files]


def _train_rank(argv: list[str], cache: str) -> RankRun:
    os.environ["HF_DATASETS_CACHE"] = cache  # before the datasets package is imported
    return train_rank(argv, True)


def _train(pool: Pool, world_size: int, argv: list[str], cache: Path) -> Run:
    return join(pool.run(world_size, _train_rank, argv, str(cache)))


def _from_start(pool: Pool, base: list[str], folder: Path) -> list[str]:
    """Flags with which runs begin with the same weights in every layout."""
    first = f"--lr 0 --train-iters 1 --save {folder} --save-interval 1"
    _train(pool, 1, [*base, *first.split()], folder)
    return [*base, *f"--load {folder} --finetune --no-load-optim --no-load-rng".split()]


def test_conversations_train_alike_in_every_layout(pool, tokenizer, tmp_path):
    base = _base(tokenizer, _write(tmp_path / "packed.jsonl", conversations_per_line=2))
    base = _from_start(pool, base, tmp_path)
    alone = _train(pool, 1, base, tmp_path)
    assert alone.losses[-1] < alone.losses[0] - 0.05
    pipeline, spread = "--pipeline-model-parallel-size", "--balance-sequences --context-parallel-size 2"
    for ranks, layout in (
        (2, f"{pipeline} 2"),
        (4, f"{pipeline} 4"),
        (2, f"{spread} --micro-batch-size 2"),  # where padding is cut off
        (4, f"{spread} {pipeline} 2"),  # where it is not
    ):
        losses, parameters = differences(_train(pool, ranks, [*base, *layout.split()], tmp_path), alone)
        assert losses <= 1e-12, layout
        assert parameters <= 1e-12, layout
    assert any("leaves the padding of conversations" in output for output in pool.output)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["", "--calculate-per-token-loss"])
def test_conversations_of_shared_micro_batches(pool, tokenizer, tmp_path, loss):
    """Over data-parallel ranks, with padding cut off and with padding left; validation averages over micro-batches."""
    base = [flag for flag in _base(tokenizer, _write(tmp_path / "packed.jsonl", 2)) if "per-token" not in flag]
    base[base.index("100,0,0")] = "50,50,0"
    base += f"--eval-interval 2 --eval-iters 1 --train-iters 2 {loss}".split()
    base = _from_start(pool, base, tmp_path)
    alone = _train(pool, 1, base, tmp_path)
    shared = "--balance-sequences --sequence-domain data"
    for ranks, layout in (
        (2, shared),
        (4, f"{shared} --context-parallel-size 2 --micro-batch-size 1"),
        (4, f"{shared} --pipeline-model-parallel-size 2"),
    ):
        run = _train(pool, ranks, [*base, *layout.split()], tmp_path)
        losses, parameters = differences(run, alone)
        assert losses <= 1e-12, layout
        assert parameters <= 1e-12, layout
        assert run.validation == pytest.approx(alone.validation, rel=1e-6), layout  # summed in float32


def test_conversations_of_dealt_steps(pool, tokenizer, tmp_path):
    """Conversations change their micro-batch, of which each is then as large as its own, without padding."""
    base = _base(tokenizer, _write(tmp_path / "packed.jsonl", conversations_per_line=2))
    base = _from_start(pool, base, tmp_path)
    dealt = "--pipeline-model-parallel-size 2 --balance-sequences --sequence-micro-batches"
    for averaged in (False, True):
        flags = [flag for flag in base if not averaged or flag != "--calculate-per-token-loss"]
        alone = _train(pool, 1, flags, tmp_path)
        for ranks, layout in ((2, dealt), (4, f"{dealt} --context-parallel-size 2")):
            losses, parameters = differences(_train(pool, ranks, [*flags, *layout.split()], tmp_path), alone)
            assert losses <= 1e-12, layout
            assert parameters <= 1e-12, layout


def test_packed_conversations_do_not_see_each_other(pool, tokenizer, tmp_path):
    """The loss over all conversations is the same with one or with four of them in a sequence."""
    first_losses = []
    for per_line in (1, 4):
        base = _base(tokenizer, _write(tmp_path / f"{per_line}.jsonl", per_line))
        flags = f"--global-batch-size {len(CONVERSATIONS) // per_line} --train-iters 1"
        first_losses += _train(pool, 1, [*base, *flags.split()], tmp_path).losses
    assert first_losses[1] == pytest.approx(first_losses[0], rel=1e-12)
