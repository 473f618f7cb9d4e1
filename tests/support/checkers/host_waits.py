"""Waits of the host for the device in a training run, counted on the CPU device.

A host that waits for its GPU gives it no work meanwhile, and the GPU is idle afterwards until it is given more. On the
CPU device nobody waits, so a `WaitCounter` follows which tensors would be on a GPU: those that are made with a CUDA
device or moved there, and all that is computed from them. To Megatron-LM and to this package they say so (`is_cuda`,
`device`), so that code takes the paths of a GPU. Counted is what makes the host wait, as torch's own
`torch.cuda.set_sync_debug_mode` has it:

- numbers of device tensors that the host reads: `item`, `tolist`, `cpu`, `bool`, ...;
- copies between host and device, but for asynchronous ones from or to pinned memory;
- operations whose result has a shape that only the device knows, such as `nonzero`;
- `synchronize` of a stream, an event or the device, a barrier, and objects sent over NCCL.

Only the thread that trains is watched; others may wait.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.replaced import replace_name

__all__ = ["WaitCounter"]

_REPOSITORY = Path(__file__).parents[3]
_OURS = tuple(str(_REPOSITORY / name) + "/" for name in ("balancing", "examples", "megatron"))
# Attention on a CPU has kernels of its own.
_ON_HOST = str(_REPOSITORY / "balancing/kernels/base.py")
_FAKES = str(_REPOSITORY / "megatron/balanced/cpu") + "/"
_TESTS = str(_REPOSITORY / "tests") + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_MEGATRON = "site-packages/megatron/"
_DEVICE = torch.device("cuda", 0)

_READS = {
    torch.ops.aten._local_scalar_dense.default: "item",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.masked_select.default: "masked_select",
    torch.ops.aten.bincount.default: "bincount",
    torch.ops.aten._unique2.default: "unique",
    torch.ops.aten.unique_consecutive.default: "unique",
    torch.ops.aten.unique_dim.default: "unique",
}
_INDEXES = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (torch.device, str)):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _place(tensor: torch.Tensor) -> str:
    """Where the memory of a tensor would be: "device", "pinned" or "host"."""
    if tensor.layout is not torch.strided:
        return _place(tensor.values())
    return getattr(tensor.untyped_storage(), "place", "host")


def _set_place(value: Any, place: str) -> Any:
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            tensor.untyped_storage().place = place
    return value


class WaitCounter:
    """Counts while `on`. waits: (file and function that waits, what it does) -> number; ours and Megatron-LM's."""

    def __init__(self) -> None:
        self.on = False
        self.waits: Counter[tuple[str, str]] = Counter()
        self._thread = threading.get_ident()  # that trains
        self._inside = 0  # of something that was counted as a whole
        self._host_groups: set[str] = set()

    def install(self) -> "WaitCounter":
        """Follow tensors in this process from now on, for good. To be called on the CPU device. Returns itself."""
        from megatron.balanced.cpu import fakes
        from megatron.balanced.cpu.function_mode import OnCpu

        replace_name(OnCpu, "__torch_function__", self._functions(OnCpu.__torch_function__))
        _Places(self).__enter__()
        for owner, kind in ((fakes.Stream, "stream"), (fakes.Event, "event"), (torch.cuda, "device")):
            owner.synchronize = self._counted(owner.synchronize, f"synchronize {kind}")
        dist.Work.wait = self._whole(dist.Work.wait)  # in which gloo copies what NCCL does not
        dist.barrier = self._counted(dist.barrier, "barrier")
        for name in _OBJECTS:
            setattr(dist, name, self._object_collective(getattr(dist, name)))
        dist.new_group = self._noting_backend(dist.new_group)
        torch.Tensor.record_stream = fakes.nothing
        torch.nn.Module.cuda = _moved(torch.nn.Module.cuda)
        torch.nn.Module.to = _moved(torch.nn.Module.to)
        base = torch.utils.data.dataloader._BaseDataLoaderIter
        base.__next__ = _pinned(base.__next__)
        return self

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def count(self, kind: str) -> None:
        if not self.on or self._inside or threading.get_ident() != self._thread:
            return
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_OURS) and not name.startswith(_FAKES):
                self.waits[f"{Path(name).relative_to(_REPOSITORY)}:{frame.f_code.co_qualname}", kind] += 1
                return
            if _MEGATRON in name:
                self.waits[f"Megatron-LM {name.rpartition(_MEGATRON)[2]}:{frame.f_code.co_qualname}", kind] += 1
                return
            if name.startswith(_TESTS) and name != __file__:
                return  # a test looks at the run
            frame = frame.f_back

    def _counted(self, original: Callable, kind: str) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count(kind)
            return original(*args, **kwargs)

        return call

    def _whole(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._as_a_whole():
                return original(*args, **kwargs)

        return call

    def _object_collective(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            if group is None or group.group_name not in self._host_groups:
                self.count("objects over NCCL")
            with self._as_a_whole():
                return original(*args, group=group, **kwargs)

        return call

    def _noting_backend(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def new_group(*args: Any, **kwargs: Any) -> Any:
            group = original(*args, **kwargs)
            if kwargs.get("backend") == "gloo" and isinstance(group, dist.ProcessGroup):
                self._host_groups.add(group.group_name)
            return group

        return new_group

    def _functions(self, original: Callable) -> Callable:
        """The function mode of the CPU device, which sees the devices that code asks for."""

        def __torch_function__(mode: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = kwargs or {}
            attribute = getattr(func, "__self__", None)
            if attribute is torch.Tensor.device or attribute is torch.Tensor.is_cuda:
                if _place(args[0]) == "device" and _asked_by_trainer():
                    return _DEVICE if attribute is torch.Tensor.device else True
            elif func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
                return self._move(lambda *a, **k: original(mode, func, types, a, k), func, args, kwargs)
            elif func is torch.nn.functional.one_hot and (args[1:] or kwargs):  # on a CPU it checks values first
                with self._as_a_whole():
                    return original(mode, func, types, args, kwargs)
            elif func is torch.Tensor.pin_memory:
                return _set_place(args[0].clone(), "pinned")
            elif func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
                if _place(args[0]) == "device":
                    assert func is torch.Tensor.tolist or not _asked_by_trainer(), "NumPy cannot read a device tensor"
                    self.count("tolist")
                with self._as_a_whole():
                    return original(mode, func, types, args, kwargs)
            result = original(mode, func, types, args, kwargs)
            if _is_cuda(kwargs.get("device")):
                if func in (torch.tensor, torch.as_tensor):
                    self.count("copy to the device")
                    result = result.clone() if isinstance(args[0], torch.Tensor) else result
                _set_place(result, "device")
            elif kwargs.get("pin_memory"):
                _set_place(result, "pinned")
            return result

        return __torch_function__

    def _move(self, call: Callable, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        """`Tensor.to`, `cuda` and `cpu`: a copy, where on a GPU one is made."""
        tensor, before = args[0], _place(args[0])
        given = [*args[1:], kwargs.get("device"), kwargs.get("other")]
        like = next((_place(each) for each in given if isinstance(each, torch.Tensor)), None)
        if func is torch.Tensor.cuda or like == "device" or (func is torch.Tensor.to and any(map(_is_cuda, given))):
            after = "device"
        elif func is torch.Tensor.cpu or like is not None or any(str(each) == "cpu" for each in given):
            after = "host"
        else:
            after = before
        with self._as_a_whole():
            result = call(*args, **kwargs)
            if (before == "device") == (after == "device"):
                return result
            result = result.clone() if result.untyped_storage() is tensor.untyped_storage() else result
        asynchronous = kwargs.get("non_blocking", False)
        if after == "device":
            if not (asynchronous and before == "pinned"):
                self.count("copy to the device")
            return _set_place(result, "device")
        if not asynchronous:
            self.count("copy to the host")
        return _set_place(result, "pinned" if asynchronous else "host")


class _Places(TorchDispatchMode):
    """Marks what is computed from device tensors, and counts operations that wait."""

    def __init__(self, counter: WaitCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = [_place(tensor) for tensor in tensors]
        if "device" not in places:
            return result
        if func in _READS:
            self._counter.count(_READS[func])
        elif func is torch.ops.aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None:
            self._counter.count("repeat_interleave")
        elif func in _INDEXES:
            indices = [(each, _place(each)) for each in args[1] if each is not None]
            if any(each.dtype in (torch.bool, torch.uint8) for each, _ in indices):
                self._counter.count("nonzero")
            elif any(place != "device" for _, place in indices):
                self._counter.count("copy to the device")
        elif func is torch.ops.aten.copy_.default and "device" in places[:2] and places[0] != places[1]:
            asynchronous = (len(args) > 2 and args[2]) or (kwargs or {}).get("non_blocking", False)
            if not (asynchronous and "pinned" in places[:2]):
                self._counter.count(f"copy to the {places[0]}")
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if getattr(storage, "place", None) is None:
                    storage.place = "device"
        return result


def _asked_by_trainer() -> bool:
    """Whether Megatron-LM or this package asks, and not torch."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    if name == _ON_HOST:
        return False
    return (name.startswith(_OURS) and not name.startswith(_FAKES)) or _MEGATRON in name


def _moved(original: Callable) -> Callable:
    """`Module.cuda` and `Module.to`, after which all of a module is on the device. Models are never moved back."""

    @functools.wraps(original)
    def move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        module = original(module, *args, **kwargs)
        if original.__name__ == "module_cuda" or any(map(_is_cuda, (*args[:1], kwargs.get("device")))):
            _set_place([*module.parameters(), *module.buffers()], "device")
        return module

    return move


def _pinned(original: Callable) -> Callable:
    """The next batch of a data loader, which Megatron-LM has in pinned memory."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        return _set_place(original(self), "pinned")

    return __next__
