"""A CPU that answers as a CUDA device, so that unmodified Megatron-LM trains over gloo.

Megatron-LM asks `torch.cuda` for a device, streams, events, memory figures and random states, and hands "cuda" to
tensor factories. `use_cpu` makes all of these answer for the CPU, as one device that runs in order: streams and events
have nothing to wait for, a copy to the device is the tensor itself, collectives run on gloo, memory figures are those
of the process. `release_cpu` puts everything back.

Two mechanisms, both process-wide and both undone by `release_cpu`:
- attributes of `torch.cuda`, `torch.distributed` and a few more modules are replaced, from one table (`_replacements`);
- a `TorchFunctionMode` turns every CUDA device that reaches a torch function into the CPU, and the methods that only
  mean something on a GPU (`cuda`, `pin_memory`) into no-ops; factories do not pin either.

It must run before `megatron.core` is imported, since Megatron copies several of these names at import.
"""

import contextlib
import functools
import importlib
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from torch.overrides import TorchFunctionMode

from megatron.balanced.cpu import gloo

__all__ = ["choose_device", "is_cpu", "release_cpu", "use_cpu"]

_CPU = torch.device("cpu")


def choose_device(requested: str) -> str:
    """Resolve `--device auto|cuda|cpu` to "cuda" or "cpu".

    Raises ValueError when CUDA is asked for and this machine or this torch has none.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {requested} is not known; use auto, cuda or cpu")
    if _active is not None:
        if requested == "cuda":
            raise ValueError("--device cuda was asked for after this process had already become a CPU device")
        return "cpu"
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise ValueError("--device cuda was asked for, but torch finds no CUDA device; use --device cpu or auto")
    return "cuda" if requested != "cpu" and available else "cpu"


class _Stream:
    """A queue of a device that runs in order: whatever was launched has already happened."""

    device = _CPU
    device_index = 0
    device_type = 1  # CUDA's number, which is what torch.cuda.Stream reports
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class _Event:
    """A moment of the device; `elapsed_time` is in milliseconds, as CUDA's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("both events must be recorded before elapsed_time()")
        return (end._seconds - self._seconds) * 1e3

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _page_bytes() -> int:
    return resource.getpagesize()


def _memory_resident(*args: Any, **kwargs: Any) -> int:
    """Bytes of this process in memory now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _page_bytes()
    except OSError:  # not Linux
        return _memory_peak()


def _memory_peak(*args: Any, **kwargs: Any) -> int:
    """Most bytes this process ever had in memory, or had since `_reset_memory_peak`."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    kilobyte = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte


def _reset_memory_peak(*args: Any, **kwargs: Any) -> None:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as clear_refs:
        clear_refs.write("5")  # proc(5): resets the peak resident size to the current one


def _memory_total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * _page_bytes()


def _memory_used_on_machine(*args: Any, **kwargs: Any) -> int:
    import psutil

    return int(psutil.virtual_memory().used)


def _memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    """`torch.cuda.memory_stats` for a process: the allocator's figures are the resident set."""
    now, peak = _memory_resident(), _memory_peak()
    stats = {"num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0, "num_device_free": 0}
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats |= {f"{kind}.all.current": now, f"{kind}.all.peak": peak, f"{kind}.all.allocated": peak}
    return stats | {"allocation.all.current": 0, "allocation.all.allocated": 0, "inactive_split_bytes.all.current": 0}


class _Properties:
    """What `torch.cuda.get_device_properties` tells of this machine."""

    name = "CPU"
    major, minor = 8, 0  # the oldest that Megatron lets have grouped GEMM; nothing newer than that may be switched on
    multi_processor_count = os.cpu_count() or 1
    total_memory = _memory_total()


def _current_generator_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_generator_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _compile(model: Callable | None = None, **options: Any) -> Callable:
    """`torch.compile` without compiling: its accelerator back ends ask for real streams."""
    return (lambda function: function) if model is None else model


def _loader_iter(original: Callable) -> Callable:
    """A data loader draws its workers' seed from the CPU's generator. On a GPU that leaves the device's generator,
    and so dropout, alone; here both are one, and only the first rank of a tensor-parallel group has a loader."""

    @functools.wraps(original)
    def __iter__(self: torch.utils.data.DataLoader) -> Iterator:
        state = torch.default_generator.get_state()
        try:
            return original(self)
        finally:
            torch.default_generator.set_state(state)

    return __iter__


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


_CUDA_TYPE = {torch.float64: "torch.cuda.FloatTensor", torch.float32: "torch.cuda.FloatTensor"}
_CUDA_TYPE |= {torch.float16: "torch.cuda.HalfTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
_CUDA_TYPE |= {torch.int64: "torch.cuda.LongTensor", torch.int32: "torch.cuda.IntTensor"}


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args and _is_cuda(args[0]):
        args = (_CPU, *args[1:])
    return torch.Tensor.to(tensor, *args, **kwargs)


def _tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizers tell the precision of a parameter by the name of its CUDA tensor type."""
    name = None if args or kwargs else _CUDA_TYPE.get(tensor.dtype)
    return name or torch.Tensor.type(tensor, *args, **kwargs)


def _tensor_float(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`float()` means "full precision" in Megatron; never lose a float64 oracle's digits."""
    if tensor.dtype is torch.float64 and torch.get_default_dtype() is torch.float64:
        return tensor
    return torch.Tensor.float(tensor, *args, **kwargs)


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


_ON_CPU: dict[Any, Callable] = {
    torch.Tensor.to: _tensor_to,
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
    torch.Tensor.type: _tensor_type,
    torch.Tensor.float: _tensor_float,
}


class _OnCpu(TorchFunctionMode):
    """Every CUDA device a torch function is given becomes the CPU. Every torch function passes here: keep it short."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = _ON_CPU.get(func, func)
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _run_backward(original: Callable) -> Callable:
    """The mode is off while it handles a function, and `torch.autograd.backward` is one, within which recomputation
    runs whole backward passes of Megatron's own functions: turn it on again for them."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _active is None else _active[0]:
            return original(*args, **kwargs)

    return run_backward


def _module_to(original: Callable) -> Callable:
    @functools.wraps(original)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args = tuple(_CPU if i == 0 and _is_cuda(a) else a for i, a in enumerate(args))
        kwargs = {k: _CPU if k == "device" and _is_cuda(v) else v for k, v in kwargs.items()}
        return original(self, *args, **kwargs)

    return to


def _module_cuda(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    return self


def _replacements() -> dict[str, Any]:
    """Dotted name -> what stands there while the CPU is the device."""
    stream = _Stream()
    null = contextlib.nullcontext
    distributed = torch.distributed
    table: dict[str, Any] = {
        # The device itself.
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda._lazy_init": _nothing,
        "torch.cuda._lazy_call": lambda callback, **kwargs: callback(),
        "torch.cuda.init": _nothing,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": _nothing,
        "torch.cuda.device": lambda device=None: null(),
        "torch.cuda.get_device_name": lambda device=None: _Properties.name,
        "torch.cuda.get_device_properties": lambda device=None: _Properties,
        "torch.cuda.get_device_capability": lambda device=None: (_Properties.major, _Properties.minor),
        "torch.cuda.check_error": _nothing,
        "torch.cuda.utilization": _nothing,
        "torch.accelerator.is_available": lambda: False,  # data loaders ask it whether to pin memory
        # Streams and events.
        "torch.cuda.Stream": _Stream,
        "torch.cuda.ExternalStream": _Stream,
        "torch.cuda.Event": _Event,
        "torch.cuda.current_stream": lambda device=None: stream,
        "torch.cuda.default_stream": lambda device=None: stream,
        "torch.cuda.set_stream": _nothing,
        "torch.cuda.stream": lambda stream=None: null(),
        "torch.cuda.synchronize": _nothing,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.nvtx.range_push": _nothing,
        "torch.cuda.nvtx.range_pop": _nothing,
        "torch.Tensor.record_stream": _nothing,  # which looks at the type of the stream before any mode is asked
        # Memory: that of the process.
        "torch.cuda.empty_cache": _nothing,
        "torch.cuda.memory_allocated": _memory_resident,
        "torch.cuda.max_memory_allocated": _memory_peak,
        "torch.cuda.memory_reserved": _memory_resident,
        "torch.cuda.max_memory_reserved": _memory_peak,
        "torch.cuda.reset_peak_memory_stats": _reset_memory_peak,
        "torch.cuda.memory_stats": _memory_stats,
        "torch.cuda.mem_get_info": lambda device=None: (_memory_total() - _memory_used_on_machine(), _memory_total()),
        "torch.cuda.device_memory_used": _memory_used_on_machine,
        # Random numbers: there is one generator, the CPU's.
        "torch.cuda.default_generators": (torch.default_generator,),
        "torch.cuda.get_rng_state": _current_generator_state,
        "torch.cuda.set_rng_state": _set_generator_state,
        "torch.cuda.random.get_rng_state": _current_generator_state,
        "torch.cuda.random.set_rng_state": _set_generator_state,
        "torch.cuda.manual_seed": _seed,
        "torch.cuda.manual_seed_all": _seed,
        "torch.utils.data.DataLoader.__iter__": _loader_iter(torch.utils.data.DataLoader.__iter__),
        # Modules and compilation.
        "torch.nn.Module.cuda": _module_cuda,
        "torch.nn.Module.to": _module_to(torch.nn.Module.to),
        "torch.compile": _compile,
        "torch.autograd._engine_run_backward": _run_backward(torch.autograd._engine_run_backward),
        # Collectives on gloo.
        "torch.distributed.init_process_group": gloo.make_group(distributed.init_process_group),
        "torch.distributed.new_group": gloo.make_group(distributed.new_group),
        "torch.distributed.all_reduce": gloo.all_reduce(distributed.all_reduce),
        "torch.distributed.all_gather": gloo.all_gather(distributed.all_gather),
        "torch.distributed.reduce_scatter": gloo.reduce_scatter(distributed.reduce_scatter),
        "torch.distributed.reduce_scatter_tensor": gloo.reduce_scatter_tensor(distributed.reduce_scatter_tensor),
        "torch.distributed.all_to_all_single": gloo.all_to_all_single(distributed.all_to_all_single),
    }
    return table


def _is_telling(record: logging.LogRecord) -> bool:
    """False for the RNG tracker's warning that the host's generator moved in a device context: both are one here."""
    return "CPU RNG state changed" not in record.getMessage()


_active: tuple[_OnCpu, list[tuple[Any, str, Any]]] | None = None
_ABSENT = object()


def _owner(dotted: str) -> tuple[Any, str]:
    path, name = dotted.rsplit(".", 1)
    owner: Any = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    return owner, name


def is_cpu() -> bool:
    """True while the CPU stands in for the CUDA device."""
    return _active is not None


def _is_cpu_build_of_megatron() -> bool:
    """True when megatron.core was imported under `use_cpu` before: what it copied at import answers for the CPU."""
    module = sys.modules["megatron.core.tensor_parallel.random"]
    return getattr(module._lazy_call, "__module__", None) == __name__


def use_cpu() -> None:
    """Make this process' CPU the CUDA device of Megatron-LM. Idempotent; `release_cpu` undoes it.

    Raises RuntimeError when `megatron.core` was imported while CUDA was the device: it holds names of the real one.
    """
    global _active
    if _active is not None:
        return
    if "megatron.core.tensor_parallel.random" in sys.modules and not _is_cpu_build_of_megatron():
        raise RuntimeError("use_cpu() must be called before megatron.core is imported")
    # torch.optim imports it later. It indexes torch's functions, so let it see the real ones.
    importlib.import_module("torch._dynamo")

    saved: list[tuple[Any, str, Any]] = []
    for dotted, replacement in _replacements().items():
        owner, name = _owner(dotted)
        saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_telling)
    mode = _OnCpu()
    mode.__enter__()
    _active = (mode, saved)


def release_cpu() -> None:
    """Give `torch.cuda` and the rest their own meaning back. Does nothing when `use_cpu` is not in force."""
    global _active
    if _active is None:
        return
    mode, saved = _active
    _active = None
    mode.__exit__(None, None, None)
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_is_telling)
    for owner, name, value in reversed(saved):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
