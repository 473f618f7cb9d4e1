"""The parts of the acceptance on GPUs, in the order in which they run: what is cheap and tells most comes first.

Imports nothing that must be installed, so that the parts can be listed anywhere.
"""

from typing import NamedTuple

__all__ = ["PARTS", "Part"]


class Part(NamedTuple):
    """One part, a test of this folder that runs once for each device.

    name: as in the table.
    test: file and function.
    seconds: time limit on a GPU, its processes' start included.
    ranks: ranks that it starts at once.
    shows: what has been shown when it passes.
    after: the name of a part without which it cannot pass, empty for none.
    """

    name: str
    test: str
    seconds: int
    ranks: int
    shows: str
    after: str = ""


_TWO, _FOUR = "NCCL, 2 ranks", "NCCL, 4 ranks"

PARTS = (
    Part(
        "attention kernels", "test_attention.py::test_kernel_parity", 120, 1, "kernels against float64, merged pieces"
    ),
    Part("split kernels", "test_expert_kernels.py::test_kernels_split_like_numpy", 60, 1, "splits equal to the token"),
    Part(_TWO, "test_collectives.py::test_two_ranks_talk", 60, 2, "every collective that training uses"),
    Part(_FOUR, "test_collectives.py::test_four_ranks_talk", 60, 4, "the same, in groups of two as well", _TWO),
    Part(
        "experts",
        "test_parity_on_devices.py::test_replicas_on_a_device",
        120,
        2,
        "losses with replicas of experts",
        _TWO,
    ),
    Part(
        "sequences", "test_parity_on_devices.py::test_documents_on_a_device", 180, 2, "losses under each planner", _TWO
    ),
    Part(
        "layers",
        "test_parity_on_devices.py::test_moved_layers_on_a_device",
        90,
        2,
        "losses with layers that move",
        _TWO,
    ),
    Part(
        "early exit",
        "test_parity_on_devices.py::test_early_exit_on_a_device",
        90,
        2,
        "tokens exit, no stage waits for ever",
        _TWO,
    ),
    Part(
        "races", "test_races_on_devices.py::test_late_streams_on_a_device", 150, 2, "late streams change no bit", _TWO
    ),
    Part(
        "stream sanitizer",
        "test_races_on_devices.py::test_sanitizer_on_a_device",
        90,
        2,
        "torch sees no unordered access",
        _TWO,
    ),
    Part(
        "cost",
        "test_cost_on_devices.py::test_launches_on_a_device",
        90,
        1,
        "launches and host time a layer, attention side by side",
    ),
    Part(
        "release",
        "test_moves_on_devices.py::test_release_on_a_device",
        60,
        2,
        "training goes on without the ranks that left",
        _TWO,
    ),
    Part(
        "memory of a move",
        "test_moves_on_devices.py::test_memory_of_a_move_on_a_device",
        60,
        2,
        "at most before or after, and a layer",
        _TWO,
    ),
    Part(
        "Transformer Engine",
        "test_parity_on_devices.py::test_all_balancers_on_a_device",
        90,
        4,
        "all three balancers with its layers",
        _FOUR,
    ),
    Part(
        "Transformer Engine's experts",
        "test_parity_on_devices.py::test_transformer_engines_experts_on_a_device",
        120,
        2,
        "replicas as further weights, in 16 and 8 bits",
        _TWO,
    ),
)
