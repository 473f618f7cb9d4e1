"""The CPU as Megatron-LM's CUDA device, so that unmodified Megatron-LM trains over gloo.

Megatron-LM asks `torch.cuda` for a device, streams, events, memory figures and random states, and passes "cuda" to
tensor factories. After `use_cpu` the CPU answers, as one device that runs in order: streams and events have nothing to
wait for, a copy to the device is the tensor itself, collectives run on gloo, memory figures are those of the process.
`release_cpu` restores everything.

Three mechanisms, all process-wide:
- one table (`_replacements`) of attributes of `torch.cuda`, `torch.distributed` and a few more modules, which are
  replaced by those of `megatron.balanced.cpu.fakes` and `megatron.balanced.cpu.gloo`;
- a `TorchFunctionMode` (`megatron.balanced.cpu.function_mode`) that maps CUDA devices to the CPU;
- imports do not find packages for GPUs, such as Transformer Engine (`megatron.balanced.cpu.packages`).

Megatron chooses its functions by these packages, and several names of `torch.cuda`, when it is imported, so
`use_cpu` must run before `megatron.core` is imported.
Packages on the way to this module therefore import nothing of Megatron's: `megatron/balanced/*/__init__.py` are empty.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.utils.data

from megatron.balanced.cpu import fakes, function_mode, gloo, packages
from megatron.balanced.shared.errors import LocalError

__all__ = ["choose_device", "is_cpu", "release_cpu", "use_cpu"]


def choose_device(requested: str) -> str:
    """Resolve `--device auto|cuda|cpu` to "cuda" or "cpu".

    Raises ValueError when CUDA is asked for and torch finds no CUDA device, and LocalError when there is one that torch
    cannot use, or none for this rank.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {requested} is not known; use auto, cuda or cpu")
    if _active is not None:
        if requested == "cuda":
            raise ValueError("--device cuda was asked for after this process had already become a CPU device")
        return "cpu"
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        _check_local_rank()
        return "cuda"
    reason = _why_no_cuda()
    if "too old" in reason:  # "auto" would silently leave the GPUs idle
        raise LocalError(f"{reason}; update the driver, install a torch for it, or use --device cpu")
    if requested == "cuda":
        raise ValueError("--device cuda was asked for, but torch finds no CUDA device; use --device cpu or auto")
    return "cpu"


def _why_no_cuda() -> str:
    """The first sentence of torch's error when it initializes CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].split(". ")[0].rstrip(".")
    return "no device is visible"


def _check_local_rank() -> None:
    """Raise LocalError if this node has fewer GPUs than ranks. Megatron-LM takes GPU number LOCAL_RANK."""
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= count:
        raise LocalError(
            f"LOCAL_RANK {rank} has no GPU, since only {count} are visible; start at most {count} ranks a node, or to "
            "share a GPU set NCCL_MULTI_RANK_GPU_ENABLE=1 and LOCAL_RANK=0 for all ranks"
        )


def _run_backward(original: Callable) -> Callable:
    """Autograd's engine with the function mode on. A mode is off while it handles a function such as
    `torch.autograd.backward`, but under recompute Megatron's functions run within it."""

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _active is None else _active[0]:
            return original(*args, **kwargs)

    return run_backward


def _replacements() -> dict[str, Any]:
    """Dotted name -> the value it has while the CPU is the device."""
    stream = fakes.Stream()
    null = contextlib.nullcontext
    distributed = torch.distributed
    table: dict[str, Any] = {
        # The device itself.
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.is_initialized": lambda: True,
        "torch.cuda._lazy_init": fakes.nothing,
        "torch.cuda._lazy_call": lambda callback, **kwargs: callback(),
        "torch.cuda.init": fakes.nothing,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.set_device": fakes.nothing,
        "torch.cuda.device": lambda device=None: null(),
        "torch.cuda.get_device_name": lambda device=None: fakes.Properties.name,
        "torch.cuda.get_device_properties": lambda device=None: fakes.Properties,
        "torch.cuda.get_device_capability": lambda device=None: (fakes.Properties.major, fakes.Properties.minor),
        "torch.cuda.check_error": fakes.nothing,
        "torch.cuda.utilization": fakes.nothing,
        "torch.accelerator.is_available": lambda: False,  # else data loaders pin memory
        # Streams and events.
        "torch.cuda.Stream": fakes.Stream,
        "torch.cuda.ExternalStream": fakes.Stream,
        "torch.cuda.Event": fakes.Event,
        "torch.cuda.current_stream": lambda device=None: stream,
        "torch.cuda.default_stream": lambda device=None: stream,
        "torch.cuda.set_stream": fakes.nothing,
        "torch.cuda.stream": lambda stream=None: null(),
        "torch.cuda.synchronize": fakes.nothing,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.nvtx.range_push": fakes.nothing,
        "torch.cuda.nvtx.range_pop": fakes.nothing,
        "torch.Tensor.record_stream": fakes.nothing,  # it checks the stream's type before any mode is called
        # Memory: that of the process.
        "torch.cuda.empty_cache": fakes.nothing,
        "torch.cuda.memory_allocated": fakes.memory_resident,
        "torch.cuda.max_memory_allocated": fakes.memory_peak,
        "torch.cuda.memory_reserved": fakes.memory_resident,
        "torch.cuda.max_memory_reserved": fakes.memory_peak,
        "torch.cuda.reset_peak_memory_stats": fakes.reset_memory_peak,
        "torch.cuda.memory_stats": fakes.memory_stats,
        "torch.cuda.mem_get_info": fakes.memory_free_and_total,
        "torch.cuda.device_memory_used": fakes.memory_used_on_host,
        # Random numbers: the CPU's generator is the only one.
        "torch.cuda.default_generators": (torch.default_generator,),
        "torch.cuda.get_rng_state": fakes.generator_state,
        "torch.cuda.set_rng_state": fakes.set_generator_state,
        "torch.cuda.random.get_rng_state": fakes.generator_state,
        "torch.cuda.random.set_rng_state": fakes.set_generator_state,
        "torch.cuda.manual_seed": fakes.seed,
        "torch.cuda.manual_seed_all": fakes.seed,
        "torch.utils.data.DataLoader.__iter__": fakes.loader_iter(torch.utils.data.DataLoader.__iter__),
        # Modules and compilation.
        "torch.nn.Module.cuda": function_mode.module_cuda,
        "torch.nn.Module.to": function_mode.module_to(torch.nn.Module.to),
        "torch.compile": fakes.do_not_compile,
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


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for the RNG tracker's warning that the host's generator changed in a device context: both are the same."""
    return "CPU RNG state changed" not in record.getMessage()


_active: tuple[function_mode.OnCpu, list[tuple[Any, str, Any]], dict[str, ModuleType]] | None = None
_ABSENT = object()


def _owner(dotted: str) -> tuple[Any, str]:
    """The object that has the attribute, and the attribute's name."""
    path, name = dotted.rsplit(".", 1)
    owner: Any = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    return owner, name


def is_cpu() -> bool:
    """True while the CPU stands in for the CUDA device."""
    return _active is not None


def _is_cpu_build_of_megatron() -> bool:
    """True when megatron.core was imported under an earlier `use_cpu`, so that its names are the CPU's."""
    module = sys.modules["megatron.core.tensor_parallel.random"]
    return getattr(module._lazy_call, "__module__", None) == __name__


def use_cpu() -> None:
    """Make the CPU the CUDA device of Megatron-LM in this process. Idempotent; `release_cpu` undoes it.

    Raises RuntimeError when `megatron.core` was imported before, with the names of the real CUDA device.
    """
    global _active
    if _active is not None:
        return
    if "megatron.core.tensor_parallel.random" in sys.modules and not _is_cpu_build_of_megatron():
        raise RuntimeError("use_cpu() must be called before megatron.core is imported")
    # torch.optim would import this later. It makes an index of torch's functions, which must be the real ones.
    importlib.import_module("torch._dynamo")

    saved: list[tuple[Any, str, Any]] = []
    for dotted, replacement in _replacements().items():
        owner, name = _owner(dotted)
        saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_relevant)
    mode = function_mode.OnCpu()
    mode.__enter__()
    _active = (mode, saved, packages.hide_packages())


def release_cpu() -> None:
    """Restore `torch.cuda` and everything else that `use_cpu` replaced. Does nothing when it is not in force."""
    global _active
    if _active is None:
        return
    mode, saved, aside = _active
    _active = None
    packages.show_packages(aside)
    mode.__exit__(None, None, None)
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_is_relevant)
    for owner, name, value in reversed(saved):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
