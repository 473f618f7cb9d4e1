"""The parts of the acceptance on GPUs in the order of worth, which is the order in which they run.

Imports nothing that must be installed, so that the parts can be listed anywhere.
"""

from typing import NamedTuple

__all__ = ["IMPORT_SECONDS", "PARTS", "Part", "listed"]

IMPORT_SECONDS = (
    12.0  # assumed, of a process that imports Megatron-LM and starts CUDA; the acceptance measures it first
)
MOST_SECONDS = 480.0  # of a part


class Part(NamedTuple):
    """One part, a test of this folder that runs once for each device.

    name: as on the command line and in the table.
    test: file and function.
    seconds: that it may take on a GPU beside the start of processes.
    starts: processes that it starts one after the other, the test's own among them.
    ranks: ranks that it starts at once.
    shows: what has been shown when it passes.
    after: the name of a part without which it cannot pass, empty for none.
    """

    name: str
    test: str
    seconds: int
    starts: int
    ranks: int
    shows: str
    after: str = ""

    def limit(self, import_seconds: float = IMPORT_SECONDS) -> float:
        """Seconds until it is stopped, where the start of a process takes `import_seconds`."""
        slower = max(1.0, import_seconds / IMPORT_SECONDS)
        return min(MOST_SECONDS, self.seconds * slower + self.starts * import_seconds)


_TRAINING = "test_parity_on_devices.py::test_"
_MOVES, _RACES = "test_moves_on_devices.py::test_", "test_races_on_devices.py::test_"
_CONTEXT = "test_context_on_devices.py::test_context_parallelism_on_a_device"
_KERNELS, _COST = "test_attention.py::test_", "test_cost_on_devices.py::test_"

PARTS = (
    Part("attention", _KERNELS + "kernel_parity", 75, 1, 1, "kernels and merged pieces against float64 on the host"),
    Part("merges", _KERNELS + "merges_and_sums", 30, 1, 1, "merges of pieces and sums of gradients against float64"),
    Part(
        "split",
        "test_expert_kernels.py::test_kernels_split_like_numpy",
        60,
        1,
        1,
        "splits of tokens equal to the token",
    ),
    Part("one-rank", _TRAINING + "one_rank_on_a_device", 120, 8, 1, "losses and waits of the host, GPU against CPU"),
    Part("replay-experts", _TRAINING + "replayed_experts", 60, 3, 1, "each of 2 ranks alone, as if in the job on CPUs"),
    Part("replay-sequences", _TRAINING + "replayed_sequences", 60, 3, 1, "the same with documents over 2 ranks"),
    Part("replay-layers", _TRAINING + "replayed_layers", 60, 3, 1, "the same with layers that move"),
    Part("nccl-2", "test_collectives.py::test_two_ranks_talk", 20, 2, 2, "every collective that training uses"),
    Part("nccl-4", "test_collectives.py::test_four_ranks_talk", 30, 2, 4, "in groups of two as well", "nccl-2"),
    Part(
        "nccl-large",
        "test_collectives.py::test_large_messages_on_several_communicators",
        20,
        3,
        2,
        "64 MiB messages, two communicators at once",
        "nccl-2",
    ),
    Part("experts", _TRAINING + "replicas_on_a_device", 60, 6, 2, "losses with replicas of experts"),
    Part("sequences", _TRAINING + "documents_on_a_device", 90, 9, 2, "losses under each planner"),
    Part("layers", _TRAINING + "moved_layers_on_a_device", 40, 5, 2, "losses with layers that move"),
    Part("races", _RACES + "late_streams_on_a_device", 90, 10, 2, "late streams change no bit, fp32 and bf16"),
    Part("cost", _COST + "launches_on_a_device", 90, 4, 1, "attention by plan and by other ways: launches, host, time"),
    Part("shares", _COST + "shares_of_a_moe_layer", 30, 2, 1, "a Mixtral layer's share of the slowest rank, by plan"),
    Part(
        "memory-of-a-move", _MOVES + "memory_of_a_move_on_a_device", 40, 2, 2, "at most one layer more; seconds, GB/s"
    ),
    Part("early-exit", _TRAINING + "early_exit_on_a_device", 40, 5, 2, "tokens exit, no stage waits for ever"),
    Part("release", _MOVES + "release_on_a_device", 30, 3, 2, "training goes on without the ranks that left"),
    Part("sanitizer", _RACES + "sanitizer_on_a_device", 60, 4, 2, "torch sees no unordered access"),
    Part("te-context", _CONTEXT, 30, 2, 4, "attention by plan against Transformer Engine's context parallelism"),
    Part("te", _TRAINING + "all_balancers_on_a_device", 60, 4, 4, "all three with Transformer Engine's layers"),
    Part("te-experts", _TRAINING + "transformer_engines_experts_on_a_device", 70, 11, 2, "replicas in 16 and 8 bits"),
)


def listed() -> list[str]:
    """One line a part: number, name, minutes, ranks, what it shows."""
    rows = [
        f"{n:2}. {p.name:<17}{p.limit() / 60:4.1f} min {p.ranks} rank(s)  {p.shows}" for n, p in enumerate(PARTS, 1)
    ]
    total = sum(part.limit() for part in PARTS) / 60
    return [*rows, f"At most {total:.0f} minutes in all where a process starts in {IMPORT_SECONDS:.0f} s."]
