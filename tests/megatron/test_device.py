"""The CPU as Megatron's CUDA device: the API works, memory figures are real, and everything can be restored."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_python
from tests.support.training import MOCK_DATA, MODEL, assert_same, join, train, train_rank

REPOSITORY = Path(__file__).resolve().parents[2]
MEGABYTE = 2**20


def _in_a_process_of_its_own(code: str) -> Any:
    """Run code in a new Python where no CUDA device is to be seen. Returns the JSON that it prints last."""
    done = run_python("-W", "ignore", "-c", textwrap.dedent(code), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_use_and_release():
    """Everything replaced is put back, and what CUDA refuses without a device it refuses again."""
    found = _in_a_process_of_its_own(
        """
        import json, logging, torch, torch._dynamo
        from torch.overrides import _get_current_function_mode_stack as modes
        from megatron.balanced.cpu import device

        refusals = []
        for requested in ("cuda", "tpu"):
            try:
                device.choose_device(requested)
            except ValueError as error:
                refusals.append(str(error))
        auto = [device.choose_device("auto"), device.choose_device("cpu")]

        names = [device._owner(name) for name in device._replacements()]
        def values():
            return [vars(owner).get(name, None) for owner, name in names]
        def same(one, other):
            return [a is b for a, b in zip(one, other, strict=True)]
        filters = logging.getLogger("megatron.core.tensor_parallel.random").filters
        before = values()
        device.use_cpu()
        used = values()
        device.use_cpu()
        again, inside = values(), [device.is_cpu(), torch.cuda.is_available(), len(modes()), len(filters)]
        made = str(torch.zeros(1, device="cuda").device)
        device.release_cpu()
        device.release_cpu()
        after = [device.is_cpu(), torch.cuda.is_available(), len(modes()), len(filters)]
        try:
            torch.zeros(1, device="cuda")
            makes = True
        except (RuntimeError, AssertionError):
            makes = False
        released = same(values(), before)

        import megatron.core.tensor_parallel.random
        try:
            device.use_cpu()
            late = ""
        except RuntimeError as error:
            late = str(error)
        print(json.dumps(dict(refusals=refusals, auto=auto, replaced=not any(same(used, before)), names=len(names),
            idempotent=all(same(used, again)), inside=inside, made=made, released=all(released), after=after,
            makes=makes, late=late)))
        """
    )
    assert found["refusals"] == [
        "--device cuda was asked for, but torch finds no CUDA device; use --device cpu or auto",
        "--device tpu is not known; use auto, cuda or cpu",
    ]
    assert found["auto"] == ["cpu", "cpu"]
    assert found["names"] > 50
    assert found["replaced"]
    assert found["idempotent"]
    assert found["inside"] == [True, True, 1, 1]
    assert found["made"] == "cpu"
    assert found["released"]
    assert found["after"] == [False, False, 0, 0]
    assert not found["makes"]
    assert "before megatron.core is imported" in found["late"]


def _train_released_and_back(argv: list[str]) -> Any:
    import torch

    from megatron.balanced.cpu import device, fakes

    device.release_cpu()
    assert torch.compile is not fakes.do_not_compile
    device.use_cpu()
    with pytest.raises(ValueError, match="already become a CPU device"):
        device.choose_device("cuda")
    assert device.choose_device("auto") == "cpu"
    return train_rank(argv, True)


def test_trains_the_same_after_release_and_use(pool):
    argv = [*MODEL, *MOCK_DATA]
    assert_same(join(pool.run(1, _train_released_and_back, argv)), train(pool, 1, parameters=True))


def _places() -> list[str]:
    """Where tensors and modules end up that were sent to a CUDA device in every spelling."""
    import torch

    cuda, tensor, linear = torch.device("cuda", 0), torch.ones(2), torch.nn.Linear(2, 2)
    made = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device="cuda:0"),
        torch.tensor([1.0], device=cuda),
        torch.arange(3, device=torch.cuda.current_device()),
        torch.rand(2, device=cuda),
        torch.full((2,), 1.0, device=f"cuda:{torch.cuda.current_device()}"),
        torch.zeros_like(tensor, device=cuda),
        tensor.new_empty(2, device=0),
        tensor.to("cuda"),
        tensor.to(cuda, torch.float64),
        tensor.to(device=cuda, dtype=torch.bfloat16),
        tensor.to(0),
        tensor.cuda(),
        tensor.cuda(non_blocking=True),
        tensor.pin_memory(),
        linear.cuda().weight,
        linear.to("cuda").weight,
        linear.to(device=cuda, dtype=torch.float64).weight,
        torch.nn.Linear(2, 2, device="cuda").weight,
        torch.nn.Parameter(torch.empty(2, device=cuda)),
    ]
    assert tensor.cuda() is tensor
    assert tensor.to("cuda") is tensor
    assert linear.to("cuda", torch.float16).weight.dtype is torch.float16
    with torch.device("cuda"):
        made.append(torch.zeros(2))
    return [str(tensor.device) for tensor in made]


def test_tensors_stay_on_the_cpu(pool):
    (places,) = pool.run(1, _places)
    assert places == ["cpu"] * len(places)


def _types() -> list[str]:
    import torch

    names = [torch.zeros(1, dtype=dtype).type() for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    double = torch.zeros(1, dtype=torch.float64)
    names.append(double.type())
    names.append(str(double.float().dtype))
    torch.set_default_dtype(torch.float64)
    names.append(str(double.float().dtype))
    assert double.type(torch.float16).dtype is torch.float16
    return names


def test_types_have_their_cuda_names(pool):
    """By which Megatron's optimizers sort parameters. In a run in float64 no digits are lost in float()."""
    (names,) = pool.run(1, _types)
    of = "torch.cuda.{}Tensor"
    assert names == [
        *(of.format(kind) for kind in ("Float", "Half", "BFloat16", "Float")),
        "torch.float32",
        "torch.float64",
    ]


def _backward_on_the_device() -> list[str]:
    """Run code of Megatron's kind, which makes tensors on the device in its backward pass, in every way to run it."""
    import torch

    places: list[str] = []

    class OnDevice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            places.append(str(torch.zeros(1, device=torch.cuda.current_device()).device))
            return gradient

    x = torch.ones(2, requires_grad=True)
    OnDevice.apply(x).sum().backward()
    torch.autograd.backward(OnDevice.apply(x).sum())
    torch.autograd.grad(OnDevice.apply(x).sum(), x)
    torch.utils.checkpoint.checkpoint(OnDevice.apply, x, use_reentrant=True).sum().backward()
    torch.utils.checkpoint.checkpoint(OnDevice.apply, x, use_reentrant=False).sum().backward()
    return places


def test_backward_passes_see_the_device(pool):
    (places,) = pool.run(1, _backward_on_the_device)
    assert places == ["cpu"] * 5


def _streams_and_events() -> None:
    import time

    import torch

    start, end, never = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    begin = time.perf_counter()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    torch.zeros(2).record_stream(stream)
    torch.cuda.synchronize()
    assert end.query()
    assert 0 <= start.elapsed_time(end) <= 1e3 * (time.perf_counter() - begin), "milliseconds"
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(never)
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1] > 0


def test_streams_and_events(pool):
    pool.run(1, _streams_and_events)


def _random_numbers() -> None:
    import torch

    torch.cuda.manual_seed(5)
    drawn = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), drawn)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), drawn)

    loader = torch.utils.data.DataLoader([1, 2, 3], shuffle=False)
    torch.cuda.set_rng_state(state)
    assert [int(item) for item in loader] == [1, 2, 3]
    assert torch.equal(torch.rand(4), drawn), "the data loader drew from the device's generator"


def test_there_is_one_generator(pool):
    pool.run(1, _random_numbers)


def _memory() -> dict[str, int]:
    import psutil
    import torch

    found = {"before": torch.cuda.memory_allocated(), "psutil": psutil.Process().memory_info().rss}
    torch.cuda.reset_peak_memory_stats()
    found["peak before"] = torch.cuda.max_memory_allocated()
    large = torch.ones(100 * MEGABYTE // 4)
    found["with 100 MB more"] = torch.cuda.memory_allocated()
    del large
    found["after"] = torch.cuda.memory_allocated()
    found["peak"] = torch.cuda.max_memory_allocated()
    stats = torch.cuda.memory_stats()
    found["stats"], found["stats peak"] = stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
    free, found["total"] = torch.cuda.mem_get_info()
    found["free"] = free
    return found


def test_memory_is_that_of_the_process(pool):
    (found,) = pool.run(1, _memory)
    assert found["before"] == pytest.approx(found["psutil"], rel=0.05)
    assert found["before"] > 100 * MEGABYTE  # torch alone is more
    assert found["with 100 MB more"] - found["before"] == pytest.approx(100 * MEGABYTE, rel=0.1)
    assert found["after"] < found["with 100 MB more"] - 80 * MEGABYTE
    assert found["peak"] - found["before"] == pytest.approx(100 * MEGABYTE, rel=0.1)
    assert found["stats"] == pytest.approx(found["after"], rel=0.05)
    assert found["stats peak"] >= found["peak"] * 0.99
    assert 0 < found["free"] < found["total"]


def test_memory_in_the_log(pool):
    train(pool, 1)
    (figures,) = set(re.findall(r"after 1 iterations\) memory \(MB\) \| allocated: ([\d.]+) \| .*", pool.output[0]))
    assert float(figures) > 100


def test_a_run_is_not_flooded_with_warnings(pool):
    """What is not installed is for the doctor to say; Megatron's own warnings may stay."""
    train(pool, 2, "--tensor-model-parallel-size 2 --sequence-parallel")
    for output in pool.output:
        assert not re.search(r"Transformer Engine|Apex|pin_memory|CPU RNG state", output), output
        assert len(re.findall(r"Warning:", output)) <= 5


def _refusal(requested: str) -> str:
    from megatron.balanced.cpu.device import choose_device
    from megatron.balanced.shared.errors import LocalError

    with pytest.raises(LocalError) as refused:
        choose_device(requested)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(monkeypatch, requested):
    import torch

    def fail() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
            "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    line = _refusal(requested)
    assert line.startswith("The NVIDIA driver on your system is too old (found version 11040); ")
    assert "--device cpu" in line


def test_more_ranks_than_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    line = _refusal("auto")
    for word in ("LOCAL_RANK 4", "4 are visible", "at most 4", "NCCL_MULTI_RANK_GPU_ENABLE=1"):
        assert word in line
