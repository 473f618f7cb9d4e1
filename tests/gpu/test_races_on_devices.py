"""Streams that should wait for each other do: late ones change no bit, and torch's sanitizer sees no race.

The reference of the first runs one kernel at a time (CUDA_LAUNCH_BLOCKING=1), so that nothing can overtake anything.
Without a GPU the same runs are made, and find that whatever is hooked still trains; `tests/megatron` has checks of
streams that need no GPU.
"""

import pytest

from tests.gpu.training import EXPERTS, PP2, Orders, base, losses, precisions, run
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.settings import settings

OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000"


def _runs(device: str, folder) -> dict[str, tuple[list[str], Orders]]:
    data = " ".join(write_documents(folder / "documents", heavy_tailed(400, seed=1)))
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


def test_late_streams_on_a_device(ranks, device, tmp_path, figure):
    waits = 0
    for name, (argv, orders) in _runs(device, tmp_path).items():
        reference = run(ranks, 2, argv, orders, environment={"CUDA_LAUNCH_BLOCKING": "1"})
        for which in ("side", "main") if device == "cuda" else ("main",):
            late = run(ranks, 2, argv, Orders(orders.moves, late=which))
            assert losses(late) == losses(reference), f"{name}: losses change where the {which} stream is late"
            for ours, theirs in zip(late, reference, strict=True):
                differ = [key for key, digest in theirs.weights.items() if ours.weights[key] != digest]
                assert theirs.weights and not differ, f"{name}: {differ} change where the {which} stream is late"
            waits += sum(rank.late for rank in late)
        figure(f"{name}: no bit changed, streams late {waits} times so far")
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


def test_sanitizer_on_a_device(ranks, device, tmp_path, figure):
    environment = {"TORCH_CUDA_SANITIZER": "1"}
    if device == "cuda":  # or silence would mean nothing
        with pytest.raises(Exception, match=r"detected \d+ errors"):
            ranks.run(1, _unordered, environment=environment)
    runs = _runs(device, tmp_path)
    for name, (argv, orders) in (runs if device == "cuda" else {"layers": runs["layers"]}).items():
        run(ranks, 2, argv, orders, environment=environment)
        figure(f"{name}: no unordered access")


def _late_by_other_names() -> list[int]:
    """How often something was late in a gather: by torch's name, then by those that Megatron-LM keeps."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings

    from tests.gpu.late_streams import make_late
    from tests.gpu.training import Told

    dist.init_process_group("gloo")
    told = Told()
    make_late("main", told)
    counts = []
    kept = [module.dist_all_gather_func for module in (mappings, param_and_grad_buffer)]
    for gather in (dist.all_gather_into_tensor, *kept):
        before = told.late
        gather(torch.empty(4), torch.ones(4))
        counts.append(told.late - before)
    return counts


def test_messages_that_megatron_looked_up_before_are_late_too(pool):
    ((by_torchs_name, *by_kept_names),) = pool.run(1, _late_by_other_names)
    assert by_torchs_name > 0 and by_kept_names == [by_torchs_name] * 2
