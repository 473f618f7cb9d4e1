"""The report on real training: it must name what was planted, miss nothing, and change nothing."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from balancing.clock import CpuClock, pace
from balancing.report import read_history, read_trace, summarize
from tests.support import training
from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.set_clock import SetClock, slow_layers
from tests.support.training import MOCK_DATA, MOE, RankRun, join, train, train_rank

MODEL = [*training.MODEL, *"--global-batch-size 8".split()]

PASSES = ("forward_s", "backward_s")


def _events(directory: Path) -> list[dict[str, Any]]:
    return events_in(directory)


@pytest.fixture
def documents(tmp_path):
    """Writes documents of the given lengths as a dataset; gives the flags that train on them."""

    def write(lengths: list[int]) -> list[str]:
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

        prefix = str(tmp_path / "documents")
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        for number, length in enumerate(lengths):
            tokens = torch.arange(number, number + length) % 126
            tokens[-1] = 126  # end of document
            builder.add_item(tokens)
            builder.end_document()
        builder.finalize(get_idx_path(prefix))
        tokenizer = "--tokenizer-type NullTokenizer --vocab-size 127"
        return f"--data-path {prefix} --split 100,0,0 {tokenizer}".split()

    return write


def _train_with(plant: str, argv: list[str]) -> list[list[int]]:
    """Train with something uneven planted. Returns the document lengths of this rank's micro-batches."""
    from megatron.balanced.trainer.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.balanced.observe import observer
    from megatron.balanced.trainer.train import train as train_with_flags

    seen: list[list[int]] = []
    attach, documents = observer.Observer.attach, observer.Observer.documents

    def plant_in(self: Any, chunks: list[Any]) -> None:
        for model in chunks:
            for module in model.modules():
                if plant == "hot expert" and type(module).__name__ == "TopKRouter" and module.layer_number == 2:
                    module.gating = _prefer(module.gating, expert=1)
        attach(self, chunks)

    def see(self: Any, lengths_of: Callable[[], list[int]], chunk: int, *of_plan: Any, **named: Any) -> None:
        if chunk == 0 and self.step is not None:
            seen.append(lengths_of())
        documents(self, lengths_of, chunk, *of_plan, **named)

    observer.Observer.attach, observer.Observer.documents = plant_in, see
    train_with_flags(args, config)
    return seen


def _prefer(gating: Any, expert: int) -> Any:
    def logits(hidden: Any) -> Any:
        scores = gating(hidden).clone()
        scores[..., expert] += 10.0
        return scores

    return logits


def _train_slowly(clock: SetClock, seconds: dict[int, tuple[float, float]], argv: list[str]) -> None:
    """Train with layers that take these seconds, forward and backward."""
    clock.install()
    slow_layers(clock, lambda layer: seconds.get(layer, (0.0, 0.0)))
    train_rank(argv, False)


def test_a_slow_layer_is_named(pool, tmp_path):
    argv = [*MODEL, *MOCK_DATA, *"--pipeline-model-parallel-size 2 --train-iters 4".split()]
    seconds = {layer: (0.01, 0.02) for layer in range(4)} | {2: (0.03, 0.03)}
    pool.run(2, _train_slowly, SetClock(), seconds, [*argv, "--balance-report", str(tmp_path)])
    summary = summarize(read_history(tmp_path))
    assert (summary.slow_layer.layer, summary.slow_layer.stage) == (2, 1)
    assert summary.slow_layer.over == pytest.approx(2)
    assert summary.stage.which == 1
    assert summary.stage.over == pytest.approx(0.09 / np.mean([0.06, 0.09]))
    for line in _events(tmp_path):
        if (line["balancer"], line["unit"]) == ("layers", "layer"):
            found = {layer: line["layers"].index(layer) for layer in seconds}
            there, back = (np.array([line[which][found[layer]] for layer in seconds]) for which in PASSES)
            np.testing.assert_allclose(np.stack([there, back], axis=1), list(seconds.values()))


def test_a_hot_expert_is_named(pool, tmp_path):
    argv = [*MODEL, *MOCK_DATA, *MOE, *"--expert-model-parallel-size 2 --train-iters 4".split()]
    pool.run(2, _train_with, "hot expert", [*argv, "--balance-report", str(tmp_path)])
    summary = summarize(read_history(tmp_path))
    assert (summary.expert.layer, summary.expert.which) == (1, 1)
    assert (summary.expert_rank.layer, summary.expert_rank.which) == (1, 0)
    for line in _events(tmp_path):
        if line["balancer"] == "experts":
            # 8 micro-batches of 32 tokens, each token to 2 of 4 experts; in the second layer one of them is expert 1.
            assert sum(line["tokens_per_expert"]) == 8 * 32 * 2
            if line["layer"] == 1:
                assert line["tokens_per_expert"][1] == 8 * 32


def test_a_long_sequence_is_named(pool, tmp_path, documents):
    # Documents of 8 tokens and a few of 32, which fill a sequence: the rank whose loader draws one has the longest.
    argv = [*MODEL, *documents([8] * 60 + [32] * 3), *"--train-iters 4 --dataloader-inter-document-masking".split()]
    seen = pool.run(2, _train_with, "nothing", [*argv, "--balance-report", str(tmp_path / "report")])
    lines = [e for e in _events(tmp_path / "report") if e["balancer"] == "sequences"]
    assert [line["tokens"] for line in lines] == [[4 * 32, 4 * 32]] * 4
    for rank in range(2):
        micro_batches = [seen[rank][i : i + 4] for i in range(0, 16, 4)]
        area = [sum(n * (n + 1) // 2 for lengths in step for n in lengths) for step in micro_batches]
        longest = [max(n for lengths in step for n in lengths) for step in micro_batches]
        assert [line["attention_area"][rank] for line in lines] == area
        assert [line["longest_sequence"][rank] for line in lines] == longest
    assert len({tuple(line["attention_area"]) for line in lines}) > 1, "the corpus should differ from step to step"
    counted = [line["longest_sequence"] for line in lines][2:]
    summary = summarize(read_history(tmp_path / "report"))
    assert summary.longest.value == np.max(counted)
    assert summary.longest.which in np.nonzero(np.max(counted, axis=0) == np.max(counted))[0]
    area = np.median([line["attention_area"] for line in lines][2:], axis=0)
    assert summary.area.which == np.argmax(area)


# ranks, flags
LAYOUTS = {
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "interleaved": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "full recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    "selective recompute": (1, "--recompute-granularity selective"),
    "more tokens": (2, "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --untie-embeddings-and-output-weights"),
    "MoE recompute": (1, " ".join(MOE) + " --recompute-granularity selective --recompute-modules moe"),
}


def _train_counting(argv: list[str]) -> RankRun:
    """On a device that takes as long for each operation."""
    SetClock().install().count_operations(1e-4)
    return train_rank(argv, False)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, "PP 2", "full recompute", "more tokens"))
def test_every_part_of_every_micro_batch_is_timed_once(pool, tmp_path, layout):
    world_size, flags = LAYOUTS[layout]
    report = f"--train-iters 3 --balance-report {tmp_path}"
    watched = join(pool.run(world_size, _train_counting, [*MODEL, *MOCK_DATA, *flags.split(), *report.split()]))
    plain = train(pool, world_size, f"{flags} --train-iters 3", base=[*MODEL, *MOCK_DATA])
    assert watched.losses == plain.losses, "watching changed the losses"

    iteration = read_trace(tmp_path / "trace.json")[-1]
    assert iteration.iteration == 3
    spans = [span for rank in iteration.spans.values() for span in rank]
    counted = Counter((span.kind, span.layer, span.micro_batch) for span in spans if span.layer != "")
    kinds = ["forward", "backward", *(["recompute"] if layout == "full recompute" else [])]
    parts = [(kind, layer) for kind in kinds for layer in range(4)]
    parts += [(kind, part) for kind in ("forward", "backward") for part in ("embedding", "head")]
    parts += [(kind, "mtp") for kind in ("forward", "backward")] if layout == "more tokens" else []
    assert counted == {(kind, part, micro_batch): 1 for kind, part in parts for micro_batch in range(8)}

    for rank, spans in iteration.spans.items():
        calls = Counter(span.kind for span in spans if span.layer == "")
        chunks = 2 if layout == "interleaved" else 1
        assert calls == {"forward-step": 8 * chunks, "backward-step": 8 * chunks, "optimizer": 1}
        inside = sum(span.busy for span in spans if span.layer != "")
        whole = sum(span.busy for span in spans if span.kind in ("forward-step", "backward-step"))
        assert inside <= whole * 1.001, f"rank {rank}: the parts of the stage are busier than the stage"
        assert inside > 0.8 * whole, f"rank {rank}: most of the stage's work is not attributed to a part"
        assert all(span.start >= 0 and span.start + span.seconds <= iteration.step_seconds * 1.001 for span in spans)

    grouped = [line.get("microbatch_group_size") for line in _events(tmp_path) if line["unit"] == "stage"]
    assert grouped == [2 if layout == "interleaved" else None] * 3

    if layout == "MoE recompute":
        tokens = [line["tokens_per_expert"] for line in _events(tmp_path) if line["balancer"] == "experts"]
        assert len(tokens) == 3 * 4
        assert all(sum(line) == 8 * 32 * 2 for line in tokens), "a recomputed router was counted twice"


def test_waiting_is_not_work(pool, tmp_path):
    """The stage without the slow layer waits for the one that has it: idle, not busy."""
    argv = [*MODEL, *MOCK_DATA, *"--pipeline-model-parallel-size 2 --train-iters 3".split()]
    pool.run(2, _train_slowly, SetClock(waits=True), {2: (0.02, 0.0)}, [*argv, "--balance-report", str(tmp_path)])
    lines = [e for e in _events(tmp_path) if (e["balancer"], e["unit"]) == ("layers", "stage")]
    assert len(lines) == 3
    for line in lines:
        assert line["busy_s"] == pytest.approx([0.0, 8 * 0.02])
        assert line["idle_s"][0] >= 8 * 0.02  # noise only makes it longer
        assert all(memory > 100e6 for memory in line["memory_bytes"])  # a process that has torch in it


def test_a_thread_that_waits_does_not_work():
    """The clock that a CPU device has where no test sets it."""
    clock, other = CpuClock(), threading.Thread(target=pace, args=(0.2,))
    begin = clock.mark()
    other.start()
    other.join()
    pace(0.01)
    _, wall, work = clock.seconds(begin, begin, clock.mark())
    assert 0.01 <= work <= wall - 0.15, "the other thread's pace is no work, however late a sleep of this one returns"


def test_report_is_complete_when_megatron_exits_early(pool, tmp_path):
    def iterations() -> list[int]:
        return [e["iteration"] for e in _events(tmp_path) if e["unit"] == "stage"]

    pool.run(2, _train_until_exit, [*MODEL, *MOCK_DATA, "--exit-interval", "3", "--balance-report", str(tmp_path)])
    assert iterations() == [1, 2, 3]


def _train_until_exit(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_rank(argv, False)
    assert stopped.value.code in (0, None)


def test_scalars_reach_tensorboard(pool, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = f"--train-iters 3 --balance-report {tmp_path / 'report'} --tensorboard-dir {tmp_path / 'tensorboard'}"
    train(pool, 2, f"--pipeline-model-parallel-size 2 {flags}")
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("balance/stage-imbalance")] == [3]
    *_, last = [e for e in _events(tmp_path / "report") if e["unit"] == "stage"]
    (bubble,) = curves.Scalars("balance/bubble-fraction")
    assert bubble.value == pytest.approx(last["bubble_fraction"], rel=1e-5)


class _Wandb:
    """W&B as a trainer uses it: values of an earlier step than the newest are dropped, and a run that has ended takes
    none."""

    def __init__(self) -> None:
        self.run: Any = None
        self.rows: dict[int, dict[str, float]] = {}
        self.config = SimpleNamespace(update=lambda *values, **named: None)

    def init(self, **settings: Any) -> None:
        self.run = settings

    def log(self, values: dict[str, float], step: int) -> None:
        if self.run is None:
            raise RuntimeError("You must call wandb.init() before wandb.log()")
        if step >= max(self.rows, default=0):
            self.rows.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.run = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **named: None


def _with_wandb(argv: list[str]) -> tuple[dict[int, dict[str, float]], bool]:
    """Rows of the last rank, and whether the run has ended."""
    import sys

    sys.modules["wandb"] = wandb = _Wandb()  # type: ignore[assignment]
    train_rank(argv, False)
    return wandb.rows, wandb.run is None  # type: ignore[attr-defined]


def test_wandb_gets_the_newest_step_of_each_write_and_none_after_its_run(pool, tmp_path):
    argv = [*MODEL, *MOCK_DATA, *f"--train-iters 25 --balance-report {tmp_path}/report".split()]
    argv += f"--tensorboard-dir {tmp_path} --wandb-project any --wandb-exp-name one --wandb-save-dir {tmp_path}".split()
    rows, ended = pool.run(2, _with_wandb, argv)[-1]
    own = [step for step, row in rows.items() if any("balance" in name for name in row)]
    assert ended and own == [10, 20] and "learning-rate" in rows[20]
    assert {line["iteration"] for line in _events(tmp_path / "report")} == {*range(1, 26)}, "the file has all"
