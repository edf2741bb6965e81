"""torch's operations on tensors that pose as device memory: queued on the caller's current stream, done late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from late_machine import Point, Touch, Work, emulated, machine, raw
from late_memory import POISON, Ref, as_host, block_of, memory
from late_streams import device_index
from torch.autograd.graph import increment_version

_base = torch._C.TensorBase
_copy_now = _base.copy_
_each_now = torch._foreach_copy_
_empty = torch.empty


class Operand:
    """A tensor as an operation sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.block = block_of(tensor)
        self.ref = Ref.of(tensor, self.block)
        self.contiguous = tensor.is_contiguous()

    @property
    def device(self) -> int | None:
        return None if self.block is None else self.block.device

    @property
    def pinned(self) -> bool:
        return memory().is_pinned(self.ref.address, self.ref.high)


def _counted(tensor: torch.Tensor) -> None:
    """Tell autograd of the write when it is queued, as torch does."""
    if not tensor.is_inference():
        increment_version(tensor)


def copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
    """Copy between devices and the host, as torch's ``copy_`` does."""
    to, of = Operand(target), Operand(source)
    _counted(target)
    if not to.ref.nbytes:
        return target
    if to.block is not None and of.block is not None:
        _across(to, of)
    elif to.block is not None:
        _to_device(to, of, non_blocking=non_blocking)
    else:
        _to_host(to, of, non_blocking=non_blocking)
    return target


def _job(to: Ref, of: Ref | torch.Tensor, *keep: object) -> Callable[[], None]:
    def job(_keep: object = keep) -> None:  # until it is done
        source = of.tensor() if isinstance(of, Ref) else of
        with torch.no_grad():
            _copy_now(to.tensor(), source)

    return job


def _across(to: Operand, of: Operand) -> None:
    """Copy within a device, or to another: on the source's stream, which both streams wait for."""
    this = machine()
    lane, other = this.current(of.device), this.current(to.device)
    if other is not lane:
        lane.follow(other.mark())
    this.counts["d2d"] += 1
    touches = [of.ref.touch(this, write=False), to.ref.touch(this, write=True)]
    lane.put(Work(_job(to.ref, of.ref), touches, "a copy on the device"))
    if other is not lane:
        other.follow(lane.mark())


def _to_device(to: Operand, of: Operand, *, non_blocking: bool) -> None:
    this = machine()
    lane = this.current(to.device)
    this.counts["h2d"] += 1
    if not to.contiguous:  # through memory of the device
        with as_host():
            memory().allocate(to.ref.shape, to.ref.dtype, lane.device)
    touches, keep = [to.ref.touch(this, write=True)], ()
    source: Ref | torch.Tensor = of.ref
    if non_blocking and of.contiguous and (of.pinned or this.kind != "cuda"):
        memory().use_pinned(of.ref.address)
        touches.append(of.ref.touch(this, write=False))
        keep = (of.tensor.untyped_storage(),)
    else:  # CUDA has read pageable memory when the call returns
        this.use_host(of.ref.address, of.ref.high, "a copy to the device reads", write=False)
        with as_host():
            source = of.tensor.detach().clone()
    lane.put(Work(_job(to.ref, source, *keep), touches, "a copy to the device"))
    if not non_blocking:
        this.wait(lane.mark(), "blocking copy")


def _to_host(to: Operand, of: Operand, *, non_blocking: bool) -> None:
    this = machine()
    lane = this.current(of.device)
    this.counts["d2h"] += 1
    asynchronous = non_blocking and to.contiguous and (to.pinned or this.kind != "cuda")
    if asynchronous:
        memory().use_pinned(to.ref.address)
        with this.lock:
            if not this.pending(this.flight, this.host, to.ref.address, to.ref.high, write=True):
                with as_host():
                    to.ref.tensor().view(torch.uint8).fill_(POISON) if to.ref.shape else None
    if not of.contiguous or of.ref.dtype != to.ref.dtype:  # through memory of the device
        with as_host():
            memory().allocate(to.ref.shape, to.ref.dtype, lane.device)
    touches = [of.ref.touch(this, write=False), to.ref.touch(this, write=True)]
    lane.put(Work(_job(to.ref, of.ref, to.tensor.untyped_storage()), touches, "a copy to the host"))
    if not asynchronous:
        this.wait(lane.mark(), "blocking copy")


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy many tensors: by one kernel where all are of one device and dtype, else one by one, as torch does."""
    kinds = {(None if (b := block_of(t)) is None else b.device, t.dtype) for t in (*targets, *sources)}
    if len(kinds) > 1 or None in next(iter(kinds), ()):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking)
        return
    _kernel("_foreach_copy_", _each_now, (targets, sources), {}, [*targets])
    machine().counts["d2d"] += 1


def launch(
    work: Callable[[], object],
    *,
    device: int | None = None,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    late: float | None = None,
    what: str = "a kernel",
) -> Point:
    """Queue any work on the caller's current stream; in it, tensors are plain memory.

    The work has no tensors of devices as arguments: it sees them through its closure, which keeps them alive.
    """
    this = machine()
    this.counts["kernel"] += 1
    touches = [Operand(each).ref.touch(this, write=False) for each in reads]
    touches += [Operand(each).ref.touch(this, write=True) for each in writes]
    return this.current(device).put(Work(work, touches, what, late=late))


def sleep(seconds: float, *, device: int | None = None) -> None:
    """Keep the caller's current stream busy."""
    machine().current(device).put(Work(lambda: None, (), "sleep", late=seconds))


# -- kernels


def _walk(value: Any, found: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments with every tensor in them replaced."""
    if isinstance(value, torch.Tensor):
        return found(value)
    if type(value) in (list, tuple):
        return type(value)(_walk(each, found) for each in value)
    if type(value) is dict:
        return {key: _walk(each, found) for key, each in value.items()}
    return value


def _tensors(*values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _walk(values, found.append)
    return found


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _kernel(name: str, real: Callable[..., Any], args: Any, kwargs: Any, targets: Sequence[torch.Tensor]) -> Any:
    """Queue an operation; what it returns is allocated now, and filled when the stream comes to it."""
    this = machine()
    operands = {id(tensor): Operand(tensor) for tensor in _tensors(args, kwargs)}
    (device,) = {one.device for one in operands.values()} - {None} or {None}
    refs: dict[int, Ref | torch.Tensor] = {}
    for number, one in operands.items():
        refs[number] = one.ref
        if one.block is None:
            if one.tensor.dim() or any(one.tensor is target for target in targets):
                raise RuntimeError(f"{name}: expected all tensors on {this.kind}:{device}, found one on the CPU")
            with as_host():
                refs[number] = one.tensor.detach().clone()
    shown, made = (None, []) if targets else _results(real, args, kwargs, device)
    outs = [Operand(each) for each in made]
    touches: list[Touch] = []
    written = {id(target) for target in targets}
    for number, one in operands.items():
        if one.block is not None:
            touches.append(one.ref.touch(this, write=number in written))
    touches += [out.ref.touch(this, write=True) for out in outs]
    held_args = _walk(args, lambda t: _Held(refs[id(t)]))
    held_kwargs = _walk(kwargs, lambda t: _Held(refs[id(t)]))
    into = [out.ref for out in outs]

    def job() -> None:
        with torch.no_grad():
            result = real(*_given(held_args), **_given(held_kwargs))
            for ref, each in zip(into, _tensors(result), strict=False):
                _copy_now(ref.tensor(), each)

    this.counts["kernel"] += 1
    this.current(device).put(Work(job, touches, name))
    for target in targets:
        _counted(target)
    if targets:
        return args[0]
    rest = iter(made)
    return _walk(shown, lambda _: next(rest))


def _results(real: Callable[..., Any], args: Any, kwargs: Any, device: int) -> tuple[Any, list[torch.Tensor]]:
    """Return what an operation returns on the meta device, and memory for every tensor in it."""
    with as_host():
        shown = real(*_walk(args, _meta), **_walk(kwargs, _meta))
    return shown, [memory().allocate(t.shape, t.dtype, device, t.stride()) for t in _tensors(shown)]


class _Held:
    """An argument, until the stream comes to it."""

    def __init__(self, ref: Ref | torch.Tensor) -> None:
        self.ref = ref


def _given(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.ref.tensor() if isinstance(value.ref, Ref) else value.ref
    if type(value) in (list, tuple):
        return type(value)(map(_given, value))
    if type(value) is dict:
        return {key: _given(each) for key, each in value.items()}
    return value


def _any_device(args: Any, kwargs: Any) -> bool:
    return any(block_of(tensor) is not None for tensor in _tensors(args, kwargs))


def _used_by_host(name: str, args: Any, kwargs: Any, *, writes: bool) -> None:
    """Look whether an operation of the CPU uses memory that a queued copy still uses."""
    this = emulated()
    if this is None or not this.flight:
        return
    for number, tensor in enumerate(_tensors(args, kwargs)):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            with as_host():
                ref = Ref.of(tensor, None)
            this.use_host(ref.address, ref.high, name, write=writes and not number)


def pure(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation that returns new tensors."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if emulated() is None or getattr(raw, "on", False):
            return real(*args, **kwargs)
        if not _any_device(args, kwargs):
            _used_by_host(name, args, kwargs, writes=False)
            return real(*args, **kwargs)
        return _kernel(name, real, args, kwargs, ())

    return call


def in_place(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation that writes to its first argument, a tensor or a list of tensors."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if emulated() is None or getattr(raw, "on", False):
            return real(*args, **kwargs)
        if not _any_device(args, kwargs):
            _used_by_host(name, args, kwargs, writes=True)
            return real(*args, **kwargs)
        return _kernel(name, real, args, kwargs, _tensors(args[0]))

    return call


def on_host(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operation that returns a value to the host: it waits for its tensors."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if emulated() is None or getattr(raw, "on", False):
            return real(*args, **kwargs)
        if not _any_device(args, kwargs):
            _used_by_host(getattr(real, "__name__", "a read"), args, kwargs, writes=False)
            return real(*args, **kwargs)
        return real(*_walk(args, to_host), **_walk(kwargs, to_host))

    return call


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, when the stream has come to it."""
    return tensor if block_of(tensor) is None else move_to(tensor, None, tensor.dtype)


def move_to(
    tensor: torch.Tensor, device: int | None, dtype: torch.dtype, *, non_blocking: bool = False
) -> torch.Tensor:
    """Return a copy on another device, or on the CPU (None)."""
    with as_host():
        like = torch.empty_like(_meta(tensor), dtype=dtype)
    if device is not None:
        made = memory().allocate(like.shape, dtype, device, like.stride())
    elif non_blocking and machine().kind == "cuda":  # torch copies to page-locked memory then
        made = memory().pin(like.untyped_storage().nbytes()).view(dtype).as_strided(like.shape, like.stride())
    else:
        with as_host():
            made = torch.empty_strided(like.shape, like.stride(), dtype=dtype)
    return copy(made, tensor, non_blocking=non_blocking)


def target_of(given: object) -> int | None:
    """Return the device that a name means: None for the CPU."""
    this = machine()
    if isinstance(given, int):
        return given
    device = torch.device(given)  # type: ignore[call-overload]
    return device_index(device) if device.type == this.kind else None
