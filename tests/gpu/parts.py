"""The parts of the acceptance on GPUs in the order of worth, and which of them run when.

Imports nothing that must be installed, so that the parts can be listed anywhere.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["IMPORT_SECONDS", "MINUTES", "PARTS", "STREAMS", "Part", "choose", "listed", "predict"]

MINUTES = 12.0
IMPORT_SECONDS = 20.0  # of a process that imports Megatron-LM beside a GPU, as on the H100 of 2026-11-26
STREAMS = 4  # parts at the same time, of up to four ranks each, on 16 cores


class Part(NamedTuple):
    """One part.

    name: as on the command line and in the table.
    test: module of this folder and function. After a dot it takes a `Trial` and starts ranks; after a colon it is the
        body of the only rank and takes the device and `Notes`.
    seconds: that it takes on an H100 beside others, without imports, which the server does once. Estimated, from the
        runs of 2026-11-26 (7 to 10 s each), where the part did not end then.
    ranks: that it starts at once, at most.
    shows: what has been shown when it passes.
    alone: whether it measures time, and nothing else may run beside it.
    needs: "engine" for Transformer Engine, "compiler" for a C compiler, "mps" for the MPS daemon.
    after: the name of a part without which it cannot pass, empty for none.
    """

    name: str
    test: str
    seconds: int
    ranks: int
    shows: str
    alone: bool = False
    needs: str = ""
    after: str = ""

    @property
    def limit(self) -> float:
        """Seconds after which it is cut, if nothing else cuts it before."""
        return 30.0 + 2.5 * self.seconds


def _alone(name: str, test: str, seconds: int, ranks: int, shows: str, needs: str = "") -> Part:
    return Part(name, test, seconds, ranks, shows, True, needs)


PARTS = (
    Part("nccl-2", "collectives.two_ranks", 6, 2, "every collective that training uses"),
    _alone(
        "cost", "costs:planners", 45, 1, "what runs of a plan at 8, 16 and 64 ranks: launches, host, device by kind"
    ),
    Part("experts", "parity.replicas", 125, 2, "replicas against none, routes fixed and free, and routes that flip"),
    _alone("trial", "quarters.trial", 45, 4, "what a job's own trials say of replicas, by the clock", "mps"),
    Part("nccl-4", "collectives.four_ranks", 8, 4, "in groups of two as well", after="nccl-2"),
    Part("nccl-large", "collectives.large_messages", 14, 2, "64 MiB, two communicators at once", after="nccl-2"),
    Part("early-exit", "parity.early_exit", 32, 2, "tokens exit, no stage waits for ever"),
    Part("te-experts", "parity.transformer_engines_experts", 100, 2, "replicas in 16 and 8 bits", needs="engine"),
    Part("release", "moves.release", 16, 2, "training goes on without the ranks that left"),
    _alone("memory-of-a-move", "moves.memory_of_a_move", 12, 2, "at most one layer more; seconds, GB/s"),
    Part("sanitizer", "races.sanitizer", 40, 2, "torch sees no unordered access"),
    _alone("quarters-experts", "quarters.experts", 95, 4, "EP 4, busiest rank 2.7 times the mean, by the clock", "mps"),
    Part("one-rank", "parity.one_rank", 42, 1, "losses of a CPU, and waits of the host"),
    Part("sequences", "parity.documents", 80, 2, "losses under each planner"),
    Part("layers", "parity.moved_layers", 48, 2, "losses with layers that move"),
    _alone("quarters", "quarters.layers", 75, 4, "moved layers by the clock: 4 stages on quarters of a GPU", "mps"),
    Part("attention", "attention:kernel_parity", 35, 1, "kernels and merged pieces against float64 on the host"),
    Part("merges", "attention:merges_and_sums", 5, 1, "merges of pieces and sums of gradients", needs="compiler"),
    _alone("attention-graphs", "graphs.attention", 22, 2, "attention replayed from CUDA graphs: bits, host, device"),
    Part("split", "splits.kernels_like_numpy", 12, 1, "splits of tokens equal to the token", needs="compiler"),
    Part("races", "races.late_streams", 80, 2, "late streams change no bit, fp32 and bf16"),
    Part(
        "te-context", "context.beside_transformer_engine", 20, 4, "attention by plan against TE's own", needs="engine"
    ),
    Part("te", "parity.all_balancers", 40, 4, "all three with Transformer Engine's layers", needs="engine"),
    _alone("rates-attention", "costs:attention_rates", 45, 1, "TFLOP/s of attention by kernel and length"),
    _alone("rates-experts", "costs:expert_rates", 50, 1, "TFLOP/s of experts by product, rows, experts and replicas"),
    _alone("rates-split", "costs:split_times", 12, 1, "device and host of a split of tokens", "compiler"),
    _alone("moe-layer", "costs:moe_layer", 10, 1, "a balanced MoE layer beside Megatron-LM's own, messages stubbed"),
    _alone("shares", "costs:moe_shares", 8, 1, "a Mixtral layer's share of the slowest rank, by plan"),
    _alone("quarters-sequences", "quarters.sequences", 70, 4, "CP 4 on packed documents, by the clock", "mps"),
)


def predict(parts: Sequence[Part], import_seconds: float = IMPORT_SECONDS) -> float:
    """Seconds of these parts: imports once, what only checks numbers in streams side by side, costs one by one."""
    streams = [0.0] * STREAMS
    for part in parts:
        if not part.alone:
            streams[streams.index(min(streams))] += part.seconds
    return import_seconds + max(streams) + sum(part.seconds for part in parts if part.alone)


def choose(minutes: float, without: Collection[str] = ()) -> list[Part]:
    """The parts that fit into so many minutes, taken by worth. without: names of parts that need not run."""
    chosen: list[Part] = []
    for part in PARTS:
        needed = part.after in ("", *without, *(other.name for other in chosen))
        if part.name not in without and needed and predict([*chosen, part]) <= 60 * minutes:
            chosen.append(part)
    return chosen


def listed(minutes: float = MINUTES) -> list[str]:
    """One line a part: number, name, seconds, ranks, what it shows; those that do not fit are marked."""
    fit = choose(minutes)
    rows = [
        f"{n:2}. {p.name:<19}{p.seconds:4} s {p.ranks} rank(s) {'alone ' if p.alone else 'beside'} "
        f"{p.shows}{'' if p in fit else ' (does not fit)'}"
        for n, p in enumerate(PARTS, 1)
    ]
    spent = predict(fit) / 60
    total = f"{len(fit)} of {len(PARTS)} parts in {spent:.1f} of {minutes:g} minutes where a process starts in"
    return [*rows, f"{total} {IMPORT_SECONDS:.0f} s: {STREAMS} parts side by side, those marked alone after them."]
