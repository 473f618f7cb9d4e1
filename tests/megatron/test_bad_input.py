"""Bad input is refused at the start with one line that names the value and the way out, once for all ranks."""

import argparse
import dataclasses
import importlib.util
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import run_command, run_python
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.pool import single_threaded
from tests.support.refusals import assert_accepted, assert_refused, parse_line
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL

BASE = [*MODEL, *MOCK_DATA]
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]
CORPUS = [*MODEL, *TOKENIZER, "--split", "100,0,0", "--data-path"]


# flags, and the words that the line must have: the value, and the way out
FLAGS = {
    "unknown": ("--num-layer 4", "--num-layer", "did you mean --num-layers?"),
    "unknown, like none": ("--qqqq", "--qqqq", "--help"),
    "not a number": ("--hidden-size wide", "--hidden-size", "wide"),
    "not a choice": ("--position-embedding-type sinusoid", "sinusoid", "rope"),
    "device": ("--device tpu", "--device tpu", "auto, cuda or cpu"),
    "two precisions": ("--bf16 --fp16", "Megatron-LM demands: not args.bf16"),
    "float64 and float32": ("--fp64 --accumulate-allreduce-grads-in-fp32", "--fp64", "in-fp32", "drop it"),
    "nowhere to save": ("--save-params-interval 2", "--save-params-interval 2", "--save DIR"),
    "saved with a shared head": (
        "--save saved --save-interval 2 --mtp-num-layers 1 --pipeline-model-parallel-size 2",
        "--save saved",
        "--mtp-num-layers 1",
        "add --untie-embeddings-and-output-weights",
    ),
    "saved with an empty stage": (
        "--save saved --save-interval 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett||tt|L",
        "--save saved",
        "--pipeline-model-parallel-layout Ett||tt|L",
        "stage 1 has no parameters",
        "give it a layer",
    ),
    "not a module of a graph": ("--cuda-graph-modules attention", "--cuda-graph-modules", "attention"),
    "groups left to others": ("--lazy-mpu-init", "--lazy-mpu-init", "drop it"),
    "no angle": ("--rotary-base -1", "--rotary-base -1", "above 0"),
    "clock of GPUs, without one": ("--log-straggler", "--log-straggler", "drop it"),
    "generator of a GPU, without one": ("--cuda-graph-impl local", "--cuda-graph-impl local", "impl none"),
    "CUDA's profiler, without it": ("--profile", "--profile", "add --use-pytorch-profiler"),
    "ring exchange": ("--use-ring-exchange-p2p", "--use-ring-exchange-p2p", "drop it"),
    "a writer that chooses a GPU, without one": (
        "--async-save --use-persistent-ckpt-worker --async-strategy mcore --save saved --save-interval 2",
        "--async-save",
        "this run does not have",
        "drop it",
    ),
    "sums in another precision": ("--bf16 --fp32-residual-connection", "--fp32-residual-connection", "drop one"),
    "half a pair": ("--position-embedding-type rope --kv-channels 1", "--kv-channels 1", "an even number"),
    "loaders of others": ("--dataloader-type external", "--dataloader-type external", "use single or cyclic"),
    "an old flag": ("--checkpoint-activations", "--checkpoint-activations", "use --recompute-activations"),
    "more layers at an end than there are": (
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 8",
        "--decoder-last-pipeline-num-layers 8",
        "--num-layers 4; lower it",
    ),
    "half a window": ("--window-size 4", "--window-size 4", "use 4,0"),
    "more choices than experts": ("--num-experts 1 --disable-bias-linear", "--moe-router-topk 2", "--num-experts 1"),
    "a decoder beside an encoder": ("--decoder-seq-length 8", "--decoder-seq-length 8", "drop it"),
    "a tokenizer of images": ("--tokenizer-type NullMultimodalTokenizer", "NullMultimodal", "a tokenizer of text"),
    "layers in no format": ("--heterogeneous-layers-config-encoded-json 1", "a mapping, not int"),
    "layers that are not installed": ("--transformer-impl transformer_engine", "transformer_engine", "impl local"),
    "halves of an odd number": ("--swiglu --ffn-hidden-size 33", "--ffn-hidden-size 33", "a multiple of 2"),
    "no padded vocabulary": ("--no-pad-vocab-size", "--no-pad-vocab-size", "--padded-vocab-size 127", "drop it"),
    "weights uninitialized": ("--init-model-with-meta-device", "--init-model-with-meta-device", "drop it"),
    "fewer tokens than the tokenizer's": ("--padded-vocab-size 64", "--padded-vocab-size 64", "127 tokens", "drop it"),
    "buffers of NCCL": ("--use-nccl-ub", "--use-nccl-ub", "this run does not have", "drop it"),
    "groups without messages": ("--fake-process-group", "--fake-process-group", "--device cpu", "drop it"),
    "groups without messages, balanced": (
        "--fake-process-group --balance-layers --pipeline-model-parallel-size 2",
        "--fake-process-group",
        "balancers",
        "drop it",
    ),
    "prediction from packed documents in overlapped batches": (
        "--dataloader-inter-document-masking --mtp-num-layers 1 --num-experts 4 --expert-model-parallel-size 2 "
        "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
        "--mtp-num-layers 1",
        "--overlap-moe-expert-parallel-comm",
        "drop one",
    ),
    "losses of samples in pieces": (
        "--dataloader-inter-document-masking --num-experts 4 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 0.01 --context-parallel-size 2 --micro-batch-size 2",
        "--micro-batch-size 2",
        "--context-parallel-size 2",
        "use --micro-batch-size 1",
        "add --balance-sequences",
    ),
    "logits of a head elsewhere": (
        "--logits-save-dir logits --pipeline-model-parallel-size 2",
        "--logits-save-dir logits",
        "--pipeline-model-parallel-size 2",
        "use 1",
    ),
    "logits that no loss compares": ("--logits-load-dir logits", "--logits-load-dir logits", "distillation; drop it"),
    "layers that would train": ("--freeze-all-layers", "--freeze-all-layers", "all layers would train; drop it"),
    "an activation that is another": ("--openai-gelu", "--openai-gelu", "GELU is exact all the same; drop it"),
    "dense layers of no width": ("--hidden-size 16 --swiglu", "--hidden-size 16", "give --ffn-hidden-size"),
    "some dense layers of no width": (
        "--hidden-size 16 --swiglu --num-experts 4 --moe-layer-freq 2",
        "--hidden-size 16",
        "give --ffn-hidden-size",
    ),
    "report of no name": ("--balance-report=", "--balance-report '' names no directory"),
    "report interval": (
        f"--balance-report report {settings('report', interval=0)}",
        "report.interval 0",
        "at least 1",
    ),
    "interval of no report": (
        settings("report", interval=5),
        "report.interval 5 does nothing without --balance-report",
    ),
    "no save interval": ("--save somewhere", "args.save_interval is not None"),
    "tensor parallel": ("--tensor-model-parallel-size 4", "world size (2) is not divisible"),
    "no pipeline": ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size 0", "at least 1"),
    "batch": ("--global-batch-size 7", "must be divisible by"),
    "instances": (
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--pipeline-model-parallel-size 2",
        "--num-distributed-optimizer-instances 2",
        "--pipeline-model-parallel-size 2",
        "--no-align-grad-reduce",
    ),
    "layers": ("--num-layers 3 --pipeline-model-parallel-size 2", "layers", "pipeline-model-parallel"),
    "fewer layers than stages": (
        "--num-layers 1 --pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 is more than --num-layers 1",
        "use at most 1",
    ),
    "context parallel": (
        "--context-parallel-size 2",
        "--context-parallel-size 2",
        "Transformer Engine",
        "add --balance-sequences",
    ),
    "flex": (
        "--num-experts 4 --moe-token-dispatcher-type flex",
        "--moe-flex-dispatcher-backend deepep",
        "deep_ep",
        "alltoall",
    ),
    "hybrid of gated delta nets": (
        "--hybrid-layer-pattern G*-",
        "--hybrid-layer-pattern G*- has G",
        "use other layers",
    ),
    "hybrid of unknown kinds": ("--hybrid-layer-pattern *-X", "--hybrid-layer-pattern *-X has 'X'", "E (MoE)"),
    "heads of Mamba": ("--hybrid-layer-pattern M*- --mamba-head-dim 48", "--mamba-head-dim 48", "--mamba-num-heads"),
    "groups of Mamba": (
        "--hybrid-layer-pattern M*- --mamba-head-dim 8 --mamba-num-groups 3",
        "--mamba-num-groups 3",
        "8 heads",
        "use a divisor",
    ),
    "Mamba's memory, packed": (
        "--hybrid-layer-pattern M*- --mamba-head-dim 8 --dataloader-inter-document-masking "
        "--disable-mamba-mem-eff-path",
        "--disable-mamba-mem-eff-path",
        "packed documents",
        "drop it",
    ),
    "hybrid prediction": ("--hybrid-layer-pattern *-/*-", "*-/*-", "leave it out"),
    "hybrid without experts": ("--hybrid-layer-pattern *E", "--hybrid-layer-pattern *E", "give --num-experts"),
    "hybrid that does not divide": (
        "--hybrid-layer-pattern *-* --pipeline-model-parallel-size 2",
        "--hybrid-layer-pattern *-*",
        "give the segments of the stages with |",
    ),
    "hybrid model, by its old name": ("--hybrid-override-pattern *-*-", "*-*-", "use --hybrid-layer-pattern"),
    "hybrid prediction, by its old name": ("--mtp-hybrid-override-pattern MM", "MM", "use --hybrid-layer-pattern"),
    "Mamba": ("--mamba-state-dim 64", "--mamba-state-dim 64", "hybrid", "drop it"),
    "Mamba's memory": ("--disable-mamba-mem-eff-path", "--disable-mamba-mem-eff-path", "drop it"),
    "graphs in a pipeline": (
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --pipeline-model-parallel-size 2",
        "--cuda-graph-impl transformer_engine",
        "use --transformer-impl transformer_engine",
    ),
    "Transformer Engine": ("--transformer-impl transformer_engine", "needs a GPU", "--transformer-impl local"),
    "delayed gradients": ("--delay-wgrad-compute", "only supported with transformer_engine"),
    "two sources of data": ("--data-path corpus", "--mock-data", "corpus", "drop one"),
}


def test_flags(pool):
    assert_refused(pool, BASE, FLAGS)


def test_numbers_of_at_least_1():
    from megatron.balanced.shared.incompatible import shown
    from megatron.balanced.trainer.checks import ranges

    assert len(ranges._AT_LEAST_1) > 20
    for name in ranges._AT_LEAST_1:
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"^{shown(name, wrong)} must be at least 1$"):
                ranges.check_ranges(argparse.Namespace(**dict.fromkeys(ranges._AT_LEAST_1) | {name: wrong}))


def _flags_that_do_not_exist(argv: list[str]) -> list[str]:
    from megatron.training.arguments import add_megatron_arguments

    from examples.dynamic_models import checks
    from megatron.balanced.shared.incompatible import INCOMPATIBLE, shown
    from megatron.balanced.trainer import arguments, balancers
    from megatron.balanced.trainer.checks import hybrid, machine, ranges
    from tests.support.limits import LATER

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    arguments.add_balance_flags(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    known |= {"--apply-rope-fusion"}  # on, unless --no-rope-fusion is given
    # What early exit reads after Megatron-LM derived it.
    present = {"virtual_pipeline_model_parallel_size"}
    check = balancers.check_balancers
    arguments.check_balancers = lambda args, config, left_to_us: (
        present.update(vars(args)),
        check(args, config, left_to_us),
    )[1]
    arguments.parse_arguments(argv)
    names = {
        *(name for row in (*INCOMPATIBLE, *checks.INCOMPATIBLE) for name in (row.flag, *row.only_with)),
        *machine._OF_GPUS,
        *ranges._AT_LEAST_1,
        *hybrid._MAMBA,
        *hybrid._OLD_NAMES,
    }
    return [name for name in sorted(names - {*LATER}) if name not in present or shown(name, True) not in known]


def test_a_writer_without_its_package(monkeypatch):
    """On a GPU; on a CPU there is no asynchronous writer."""
    from megatron.balanced.trainer.checks import machine

    monkeypatch.setattr(machine, "_has_resiliency", lambda: False)
    asked = argparse.Namespace(async_save=True, async_strategy="nvrx")
    with pytest.raises(
        ValueError, match=r"--async-strategy nvrx needs nvidia-resiliency-ext.*use --async-strategy mcore"
    ):
        machine.check_machine(asked, argparse.Namespace(fp64=False), "cuda")


def test_flags_that_are_refused_exist(pool):
    """A row with a misspelt or removed flag would refuse nothing, and one with another name would mislead."""
    assert pool.run(1, _flags_that_do_not_exist, BASE) == [[]]


def test_the_same_flags_without_the_fault_are_accepted(pool):
    assert_accepted(pool, BASE, [""])


def test_no_interval_of_validation(pool):
    at = MODEL.index("--eval-interval")
    model = MODEL[:at] + MODEL[at + 2 :]
    assert_refused(pool, [*model, *MOCK_DATA], {"no interval": ("", "--eval-interval 1000", "--eval-iters 0")})
    assert_accepted(pool, [*model, *MOCK_DATA], ["--full-validation"])


class Damage:
    """A whole corpus, and what can happen to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = folder / "whole"
        write_documents(self.whole, heavy_tailed(20))

    def copy(self, name: str) -> tuple[Path, Path, Path]:
        paths = [Path(f"{self.whole}{end}") for end in (".bin", ".idx")]
        copies = [self.folder / f"{name}{path.suffix}" for path in paths]
        for path, copy in zip(paths, copies, strict=True):
            shutil.copy(path, copy)
        return self.folder / name, *copies

    def cut(self, name: str, end: str, keep: float) -> Path:
        prefix, *files = self.copy(name)
        file = next(file for file in files if file.suffix == end)
        os.truncate(file, int(file.stat().st_size * keep))
        return prefix


def test_damaged_corpora(pool, tmp_path):
    damage = Damage(tmp_path)
    without_tokens, tokens, _ = damage.copy("no tokens")
    tokens.unlink()
    text, _, index = damage.copy("text")
    index.write_text("It was a dark and stormy night, and no index was to be seen anywhere at all.")
    write_documents(tmp_path / "no documents", [])
    write_documents(tmp_path / "blank", [np.array([], dtype=np.int64)] * 3)
    cases = [
        (tmp_path / "nowhere", f"{tmp_path}/nowhere.idx does not exist", "prepare_data.py"),
        (f"{damage.whole}.bin", "does not exist", "without .bin or .idx"),
        (without_tokens, f"{tokens} does not exist"),
        (damage.cut("half index", ".idx", 0.5), "half index.idx is truncated"),
        (damage.cut("head of an index", ".idx", 0.1), "head of an index.idx is truncated"),
        (damage.cut("empty index", ".idx", 0), "empty index.idx is empty"),
        (damage.cut("half the tokens", ".bin", 0.5), "half the tokens.bin is truncated", "write the pair again"),
        (damage.cut("empty tokens", ".bin", 0), "empty tokens.bin is empty"),
        (text, "text.idx is not an index"),
        (tmp_path / "no documents", "empty corpus"),
        (tmp_path / "blank", "empty corpus", "3 documents"),
    ]
    # One bad part of a blend is found, wherever it stands.
    blend = ["50", str(damage.whole), "50", str(tmp_path / "nowhere")]
    refused = {str(prefix): ([str(prefix)], *words) for prefix, *words in cases}
    assert_refused(pool, CORPUS, refused | {"blend": (blend, "nowhere.idx does not exist")})
    assert_accepted(pool, CORPUS, [str(damage.whole)])


def test_what_stands_in_a_corpus(pool, tmp_path):
    """Lengths below 0 would have Megatron-LM look for samples without end, and ids above the vocabulary fail later."""
    damage = Damage(tmp_path)
    below, _, index = damage.copy("below")
    content = bytearray(index.read_bytes())
    content[34 : 34 + 4 * 10] = b"\xff" * 4 * 10
    index.write_bytes(content)
    beyond, _, index = damage.copy("beyond")
    content = bytearray(index.read_bytes())
    content[34:38] = (10**9).to_bytes(4, "little")
    index.write_bytes(content)
    documents = heavy_tailed(20)
    documents[7][1] = 5000
    at = sum(map(len, documents[:7])) + 2
    write_documents(tmp_path / "ids", documents)
    said = f"ids.bin has token 5000 at position {at:,}, but the model's vocabulary has 128"
    cases = {
        "lengths below 0": ([str(below)], "below.idx is damaged: document 0 has -1 tokens", "write the"),
        "lengths beyond": ([str(beyond)], "beyond.idx is damaged: document 0 has 1000000000 tokens"),
        "ids": ([str(tmp_path / "ids")], said, "--vocab-size"),
    }
    assert_refused(pool, CORPUS, cases)

    write_documents(tmp_path / "endless", [document[:-1] for document in heavy_tailed(20)])
    for flags, notes in (("", 0), ("--dataloader-inter-document-masking", 0), ("--eod-mask-loss", 1)):
        ((code, _),) = pool.run(1, parse_line, [*CORPUS, str(tmp_path / "endless"), *flags.split()])
        assert code == "none" and pool.output[0].count("needs it; write the corpus with --append-eod") == notes


def test_a_large_corpus_is_looked_at_in_blocks(tmp_path):
    from megatron.balanced.trainer.checks import data

    count = 3 * data._LOOKED_AT
    np.arange(count, dtype=np.int32).tofile(tmp_path / "numbers")
    blocks = list(data._read(tmp_path / "numbers", np.int32, 0, count))
    assert sum(len(block) for _, block in blocks) == data._LOOKED_AT
    assert blocks[0][0] == 0 and blocks[-1][1][-1] == count - 1
    assert all(block[0] == first for first, block in blocks)
    assert sum(len(block) for _, block in data._read(tmp_path / "numbers", np.int32, 4, 100_000)) == 100_000


SPLITS = {
    "no training": ("0,100,0", "", "--split 0,100,0", "nothing to train on"),
    "no validation": ("100,0,0", "--eval-iters 1", "--split 100,0,0", "--eval-iters 1", "--eval-iters 0"),
    "not a split": ("most", "", "--split most", "try --split 98,2,0"),
    "empty test set": ("969,30,1", "", "20 document(s)", "--split 969,30,1", "test set"),
    "empty validation set": ("99,1,0", "", "20 document(s)", "--split 99,1,0", "validation set"),
}


def test_splits(pool, tmp_path):
    """Where a set has no documents, Megatron would look for samples without end."""
    data = write_documents(tmp_path / "documents", heavy_tailed(20))
    cases = {case: (f"--split {split} {flags}", *words) for case, (split, flags, *words) in SPLITS.items()}
    assert_refused(pool, [*MODEL, *data], cases)


def test_no_data(pool):
    cases = {"none": ("", "--data-path", "--mock-data")}
    if importlib.util.find_spec("datasets") is None:
        cases["no package"] = ("--sft --data-path conversations.jsonl", "--sft needs datasets", "pip install")
    assert_refused(pool, [*MODEL, *TOKENIZER], cases)


def test_folders_that_cannot_be_written(pool, tmp_path):
    """Below a regular file: what holds for root too, who may write where the permissions say no."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "folder"
    flags = ("--balance-report", "--save-interval 1 --save", "--tensorboard-dir")
    cases = {each: (f"{each} {folder}", f"{each.split()[-1]} {folder}", "Not a directory") for each in flags}
    assert_refused(pool, BASE, cases)


def _only_on_second(argv: list[str]) -> tuple[object, str]:
    """Rank 1 alone does not find the package that a corpus needs."""
    from megatron.balanced.trainer import arguments

    if os.environ["RANK"] == "1":

        def missing(args: object) -> None:
            raise ImportError("no module named 'corpus'; pip install corpus")

        arguments.check_data = missing
    return parse_line(argv)


def test_what_is_wrong_on_one_rank_alone(pool):
    """It is said by the rank that has it; the other one ends without a word."""
    (code, said), (other, other_said) = reversed(pool.run(2, _only_on_second, BASE))
    assert (code, other) == (2, 2)
    assert "pretrain_gpt.py: error: no module named 'corpus'; pip install corpus (rank 1 of 2)\n" in said
    assert "error" not in other_said


def test_help(pool):
    """As the README names it: all of our flags, each with its help."""
    assert pool.run(1, run_command, ["--help"]) == [(0, "")]

    from megatron.balanced.trainer.config import SECTIONS, BalanceConfig

    shown = "".join(pool.output[0].split())
    assert "--balance-config" in shown
    for config in (BalanceConfig, *SECTIONS.values()):
        for field in dataclasses.fields(config):
            if flag := field.metadata.get("flag"):
                assert flag in shown
                assert "".join((field.metadata["help"] % {}).split()) in shown, field.name
    assert "moe-paged-stash-buffer-size-factor-cuda" in shown


def test_as_a_user_meets_it(tmp_path):
    """The command itself, for what happens before Megatron is imported."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 0\n")
    older = {"PYTHONPATH": os.pathsep.join([str(tmp_path), single_threaded()["PYTHONPATH"]])}
    cuda = "--device cuda was asked for, but torch finds no CUDA device; use --device cpu or auto"
    for flags, environment, words in (
        ("--device cuda", {"CUDA_VISIBLE_DEVICES": ""}, (cuda,)),
        ("", older, ("megatron-core 0.15.0", "pip install megatron-core==")),
    ):
        done = run_python("pretrain_gpt.py", *BASE, *flags.split(), **environment)
        assert done.returncode == 2, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if not re.match(r"[IWE]\d{4} ", line)]  # torch's own
        assert line.startswith("pretrain_gpt.py: error: ") and all(word in line for word in words), line
