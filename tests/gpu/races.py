"""Streams that should wait for each other do: late ones change no bit, and torch's sanitizer sees no race.

The reference of the first runs one kernel at a time (CUDA_LAUNCH_BLOCKING=1), so that nothing can overtake anything.
Without a GPU the same runs are made, and find that whatever is hooked still trains; `tests/megatron` has checks of
streams that need no GPU.
"""

import re

from tests.gpu.training import EXPERTS, PP2, Orders, base, losses, precisions, run
from tests.gpu.trial import Trial
from tests.support.corpus import heavy_tailed
from tests.support.settings import settings

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000"


def _runs(trial: Trial) -> dict[str, tuple[list[str], Orders]]:
    device, data = trial.device, trial.write_documents(heavy_tailed(400, seed=1))
    documents = f"--context-parallel-size 2 --balance-sequences --dataloader-inter-document-masking {EXPERTS}"
    experts = f"--balance-experts {settings('experts', min_gain=0)} --deterministic-mode"
    layers = f"{PP2} --balance-layers --deterministic-mode"
    half = precisions(device)[-1]  # in which attention runs as a flash kernel
    overlapped = f"{EXPERTS} {experts} {OVERLAPS} --overlap-moe-expert-parallel-comm"
    return {
        "experts and sequences": ([*base(device, half, data), *f"{documents} {experts} {OVERLAPS}".split()], Orders()),
        "experts, messages overlapped": ([*base(device, half), *overlapped.split()], Orders()),
        "layers": ([*base(device), *layers.split()], Orders({1: ((3,), (1,)), 2: ((1,), (3,))})),
    }


def late_streams(trial: Trial) -> None:
    waits = 0
    for name, (argv, orders) in _runs(trial).items():
        reference = run(trial, 2, argv, orders, what=name, environment={"CUDA_LAUNCH_BLOCKING": "1"})
        for which in ("side", "main") if trial.device == "cuda" else ("main",):
            late = run(trial, 2, argv, Orders(orders.moves, late=which), what=f"{name}, {which} streams late")
            assert losses(late) == losses(reference), f"{name}: losses change where the {which} stream is late"
            for ours, theirs in zip(late, reference, strict=True):
                differ = [key for key, digest in theirs.weights.items() if ours.weights[key] != digest]
                assert theirs.weights and not differ, f"{name}: {differ} change where the {which} stream is late"
            waits += sum(rank.late for rank in late)
        trial.figure(f"{name}: no bit changed, streams late {waits} times so far")
    assert waits > 100, "hardly any stream was late"


def _unordered() -> None:
    """Two streams write to one tensor without waiting for each other."""
    import torch

    from tests.gpu.training import local_device

    place = local_device("cuda")
    tensor = torch.zeros(1 << 20, device=place)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor.add_(1)
    tensor.mul_(2)


def sanitizer(trial: Trial) -> None:
    environment = {"TORCH_CUDA_SANITIZER": "1"}
    if trial.device == "cuda":  # or silence would mean nothing
        try:
            trial.run(1, _unordered, environment=environment)
        except Exception as error:
            assert re.search(r"detected \d+ errors", str(error)), "torch's sanitizer ends with something else"
        else:
            raise AssertionError("torch's sanitizer does not see a race")
    runs = _runs(trial)
    for name, (argv, orders) in (runs if trial.device == "cuda" else {"layers": runs["layers"]}).items():
        run(trial, 2, argv, orders, what=name, environment=environment)
        trial.figure(f"{name}: no unordered access")
