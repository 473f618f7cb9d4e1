"""Ranks that leave, and the memory that a move of layers takes."""

from tests.gpu.training import PP2, TOLERANCE, Orders, base, difference, losses, run
from tests.gpu.trial import Trial

SMALL = 1 << 15  # bytes of messages about layers, and of what is no layer's
ROUNDING = 0.01  # of CUDA's allocator


def release(trial: Trial) -> None:
    """From the third iteration on, one of two stages does with all layers; the ranks of the other are gone."""
    argv = [*base(trial.device), *f"{PP2} --balance-layers --repack-throughput-floor 0.5".split()]
    reference = run(trial, 2, argv, Orders({9: ((2,), (2,))}))
    stayed, left = run(trial, 2, argv, Orders({2: ((4,),)}))
    assert not stayed.left and left.left
    stayed.losses = left.losses + stayed.losses  # each has those of the steps in which it was the last stage
    left.losses = []
    found = difference([stayed, left], reference)
    assert found <= TOLERANCE["fp32"]
    trial.figure(f"losses within {found:.1e}, {len(losses(reference))} iterations")


def memory_of_a_move(trial: Trial) -> None:
    """A move takes at most what a stage holds before or after it, and one layer."""
    width = "--hidden-size 64" if trial.device == "cpu" else "--hidden-size 1024"
    argv = [*base(trial.device, "bf16"), *f"{width} --num-layers 8 {PP2} --balance-layers --train-iters 3".split()]
    per_weight = 2 + 4 + 4 + 8  # bytes of a parameter: bf16, its gradient and its copy in float32, two moments
    most = 0.0
    for rank in run(trial, 2, argv, Orders({2: ((6,), (2,))}, memory=True)):
        ((before, after, peak, weights, seconds, reserved),) = rank.moves
        layer = weights * per_weight // 2
        assert abs(before - after) > 1.5 * layer, "hardly anything moved"
        bound = max(before, after) + layer
        assert peak <= (1 + ROUNDING) * bound + SMALL, f"{peak} bytes at most, where {bound} should do"
        most = max(most, (peak - max(before, after)) / layer)
        moved = abs(before - after)
        held = f", the allocator holds at most {reserved / 1e6:.0f} MB where {peak / 1e6:.0f} MB are used" * bool(
            reserved
        )
        trial.figure(f"{moved / 1e6:.0f} MB in {seconds:.2f} s, {moved / seconds / 1e9:.2f} GB/s{held}")
    trial.figure(f"at most {most:.2f} of a layer above the larger of before and after")
