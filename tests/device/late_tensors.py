"""What tensors and functions of torch do in the emulation: each is found by its schema, or written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import late_ops as ops
import torch
from late_machine import emulated, machine, raw
from late_memory import as_host, block_of, memory
from late_streams import Stream, device_index

_base = torch._C.TensorBase
Patches = dict[tuple[object, str], object]


def _words(text: str) -> list[str]:
    return text.split()


BY_HAND = _words(
    "copy_ clone contiguous to cpu cuda xpu type reshape flatten ravel resolve_conj resolve_neg _foreach_copy_ "
    "detach requires_grad_ retain_grad record_stream is_pinned pin_memory numpy set_ resize_ resize_as_ data "
    "rename_ swapdims_ transpose_ squeeze_ unsqueeze_ t_ as_strided_ detach_ swapaxes_ index _backward "
    "backward result_type promote_types can_cast is_same_size size stride numel dim type_as _to_copy _conj "
    "_neg_view"
)
VALUES = _words("item tolist __bool__ __float__ __int__ __index__ __complex__ equal allclose is_nonzero __contains__")
OPERATORS = _words(
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv pow rpow mod matmul rmatmul neg pos abs "
    "invert eq ne lt le gt ge and rand or ror xor rxor"
)
IN_PLACE_OPERATORS = _words("iadd isub imul itruediv ifloordiv ipow imod iand ior ixor")
FACTORIES = _words(
    "empty zeros ones full rand randn randint arange tensor empty_strided scalar_tensor linspace eye randperm "
    "as_tensor empty_like zeros_like ones_like full_like rand_like randn_like"
)
CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
}


def _posing(native: Any, pose: Callable[[torch.Tensor, int], Any], *, called: bool = False) -> Any:
    """Make a property, or a method, that says something else of device memory."""

    def get(tensor: torch.Tensor, *args: Any) -> Any:
        if (block := block_of(tensor)) is not None:
            return pose(tensor, block.device)
        return native(tensor, *args) if called else native.__get__(tensor)

    return get if called else property(get, native.__set__)


def _live(tensor: object) -> bool:
    """Whether a method has to look at more than memory of the host."""
    return emulated() is not None and not getattr(raw, "on", False) and isinstance(tensor, torch.Tensor)


def _copy_(self: torch.Tensor, src: Any, non_blocking: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002 -- torch's
    if not _live(self) or (block_of(self) is None and block_of(src) is None):
        if _live(self):
            ops._used_by_host("copy_", (self, src), {}, writes=True)
        return _base.copy_(self, src, non_blocking)
    return ops.copy(self, src, non_blocking=non_blocking)


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not _live(self):
        return _base.to(self, *args, **kwargs)
    copied = kwargs.pop("copy", False)
    if args and isinstance(args[0], torch.Tensor):
        wanted, dtype, late = args[0].device, args[0].dtype, bool(kwargs.get("non_blocking"))
    else:
        wanted, dtype, late, _ = torch._C._nn._parse_to(*args, **kwargs)
    block = block_of(self)
    here = None if block is None else block.device
    there = here if wanted is None else ops.target_of(wanted)
    if here is None and there is None:
        ops._used_by_host("to", (self,), {}, writes=False)
        return _base.to(self, *args, **kwargs, **({"copy": True} if copied else {}))
    dtype = dtype or self.dtype
    if here == there and dtype == self.dtype and not copied:
        return self
    return ops.move_to(self, there, dtype, non_blocking=late)


def _cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _base.cpu(self, *args, **kwargs) if block_of(self) is None else _to(self, "cpu")


def _clone(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not _live(self) or (block := block_of(self)) is None:
        return _CLONE(self, *args, **kwargs)
    form = kwargs.get("memory_format", torch.preserve_format)
    with as_host():
        like = torch.empty_like(ops._meta(self), memory_format=form)
    return ops.copy(memory().allocate(like.shape, like.dtype, block.device, like.stride()), self)


_CLONE = ops.pure("clone", _base.clone)


def _contiguous(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if block_of(self) is None or self.is_contiguous():
        return _base.contiguous(self, *args, **kwargs)
    return _clone(self, memory_format=torch.contiguous_format)


def _resolved(name: str, lazy: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    native = getattr(_base, name)

    def call(self: torch.Tensor) -> torch.Tensor:
        return _clone(self) if block_of(self) is not None and lazy(self) else native(self)

    return call


def _shaped(name: str) -> Callable[..., torch.Tensor]:
    native = getattr(_base, name)

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if block_of(self) is None:
            return native(self, *args, **kwargs)
        with as_host():
            shape = native(ops._meta(self), *args, **kwargs).shape
        try:
            return self.view(shape)
        except RuntimeError:
            return _contiguous(self).view(shape)

    return call


def _cast(name: str) -> Callable[..., torch.Tensor]:
    native, dtype = getattr(_base, name), CASTS[name]
    return lambda self, *args, **kwargs: native(self, *args, **kwargs) if block_of(self) is None else _to(self, dtype)


def _refused(name: str) -> Callable[..., Any]:
    native = getattr(torch.Tensor, name)

    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if block_of(self) is not None:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")
        return native(self, *args, **kwargs)

    return call


def _shown(self: torch.Tensor, **_: object) -> str:
    return f"{_REPR(ops.to_host(self))} on {self.device}" if block_of(self) is not None else _REPR(self)


_REPR = torch.Tensor.__repr__
_ITEM, _ITEM_WRITE = _base.__getitem__, _base.__setitem__


def _getitem(self: torch.Tensor, index: Any) -> Any:
    if _live(self) and ops._tensors(index) and block_of(self) is not None:
        return ops._kernel("index", _ITEM, (self, index), {}, ())
    return _ITEM(self, index)


def _is_pinned(self: torch.Tensor, *_: object) -> bool:
    if not _live(self) or block_of(self) is not None:
        return False
    start = self.data_ptr()
    return bool(start) and memory().is_pinned(start, start + max(self.nbytes, 1))


def _pin_memory(self: torch.Tensor, *_: object) -> torch.Tensor:
    if self.is_pinned():
        return self
    return memory().pin(self.nbytes).view(self.dtype).view(self.shape).copy_(self)


def _record_stream(self: torch.Tensor, stream: Stream) -> None:
    block = block_of(self)
    assert block is not None
    block.shared.add(stream.lane.number)


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
    if block_of(self) is None:
        return _DEEPCOPY(self, memo)
    if id(self) not in memo:
        made = _clone(self.detach())
        parameter = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
    return memo[id(self)]


_DEEPCOPY = torch.Tensor.__deepcopy__


def _factory(name: str) -> Callable[..., Any]:  # noqa: C901 -- one case a line
    native = getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: PLR0911 -- as above
        if emulated() is None or getattr(raw, "on", False):
            return native(*args, **kwargs)
        wanted = kwargs.get("device")
        if wanted is None and name == "as_tensor" and isinstance(args[0], torch.Tensor):
            return _to(args[0], kwargs.get("dtype") or args[0].dtype)
        if wanted is None and name.endswith("_like") and block_of(args[0]) is not None:
            wanted = args[0].device
        there = None if wanted is None else ops.target_of(wanted)
        pinned = kwargs.pop("pin_memory", False)
        if there is None and not pinned and not ops._any_device(args, kwargs):
            return native(*args, **kwargs)
        kwargs["device"] = "cpu" if there is None or not name.startswith("empty") else "meta"
        if name.endswith("_like"):
            args = (ops._meta(args[0]), *args[1:])
        if pinned and name == "empty":
            kwargs["device"] = "meta"
        with as_host():
            made = native(*ops._walk(args, lambda t: t), **kwargs)
        if there is None and pinned:
            nbytes = made.nbytes
            return memory().pin(nbytes).view(made.dtype).view(made.shape)
        if there is None:
            return made
        if made.is_meta:
            return memory().allocate(made.shape, made.dtype, there, made.stride())
        return ops.move_to(made, there, made.dtype, non_blocking=machine().kind == "cuda")

    return call


def _schemas(name: str) -> Sequence[Any]:
    return torch._C._jit_get_schemas_for_operator(f"aten::{name}")


def _kind_of(name: str) -> str:
    """Say of an operation whether it writes to its first argument, returns views, new tensors, or none."""
    found = [s for s in _schemas(name) if s.arguments and "Tensor" in str(s.arguments[0].type)]
    found = [s for s in found if not any(a.alias_info is not None and a.alias_info.is_write for a in s.arguments)]
    if name.endswith("_") and not name.endswith("__"):
        return "writes"
    if name in ("eq", "ne"):
        return "new"
    if not found or any(r.alias_info is not None for s in found for r in s.returns):
        return "views"
    return "new" if all("Tensor" in str(r.type) for s in found for r in s.returns) and found[0].returns else "none"


def _operations() -> Patches:
    """Wrap all operations of torch that compute, by their schemas."""
    patches: Patches = {}
    functions = torch._C._VariableFunctions
    for owner, source in ((torch.Tensor, _base), (torch, functions)):
        for name in dir(source):
            if name in BY_HAND or name in VALUES or name in FACTORIES or name.startswith("__") or not _schemas(name):
                continue
            real, kind = getattr(source, name), _kind_of(name)
            if not callable(real) or not hasattr(owner, name):
                continue
            if kind == "writes":
                patches[owner, name] = ops.in_place(name, real)
            elif kind == "new" and (owner is torch.Tensor or _schemas(name)[0].arguments[0].name != "size"):
                patches[owner, name] = ops.pure(name, real)
    return patches


def _operators() -> Patches:
    """Wrap Python's operators, and what returns a value to the host."""
    patches: Patches = {}
    for name in OPERATORS:
        if hasattr(torch.Tensor, f"__{name}__"):
            patches[torch.Tensor, f"__{name}__"] = ops.pure(name, getattr(torch.Tensor, f"__{name}__"))
    for name in IN_PLACE_OPERATORS:
        patches[torch.Tensor, f"__{name}__"] = ops.in_place(name, getattr(torch.Tensor, f"__{name}__"))
    for name in VALUES:
        patches[torch.Tensor, name] = ops.on_host(getattr(torch.Tensor, name))
    for name in ("equal", "allclose"):
        patches[torch, name] = ops.on_host(getattr(torch, name))
    return patches


def of_tensors(kind: str) -> Patches:
    """Wrap what a tensor says of itself, and what moves it."""
    tensor = torch.Tensor
    patches = _operations() | _operators()
    patches |= {(torch, name): _factory(name) for name in FACTORIES}
    patches |= {(tensor, name): _cast(name) for name in CASTS}
    patches |= {(tensor, name): _shaped(name) for name in ("reshape", "flatten", "ravel")}
    patches |= {(tensor, name): _refused(name) for name in ("numpy", "__array__")}
    for name in ("is_cuda", "is_xpu"):
        patches[tensor, name] = _posing(getattr(_base, name), lambda _, __, name=name: name == f"is_{kind}")
    patches |= {
        (tensor, "is_cpu"): _posing(_base.is_cpu, lambda *_: False),
        (tensor, "device"): _posing(_base.device, lambda _, index: torch.device(kind, index)),
        (tensor, "get_device"): _posing(_base.get_device, lambda _, index: index, called=True),
        (tensor, "copy_"): _copy_,
        (tensor, "to"): _to,
        (tensor, "cpu"): _cpu,
        (tensor, kind): lambda self, device=None, non_blocking=False: _to(
            self, torch.device(kind, device_index(device)), non_blocking=non_blocking
        ),
        (tensor, "clone"): _clone,
        (torch, "clone"): _clone,
        (tensor, "contiguous"): _contiguous,
        (tensor, "resolve_neg"): _resolved("resolve_neg", _base.is_neg),
        (tensor, "resolve_conj"): _resolved("resolve_conj", _base.is_conj),
        (tensor, "is_pinned"): _is_pinned,
        (tensor, "pin_memory"): _pin_memory,
        (tensor, "record_stream"): _record_stream,
        (tensor, "__repr__"): _shown,
        (tensor, "__deepcopy__"): _deepcopy,
        (tensor, "__getitem__"): _getitem,
        (tensor, "__setitem__"): _setitem,
        (torch, "reshape"): _shaped("reshape"),
        (torch, "_foreach_copy_"): _each,
    }
    return patches


def _setitem(self: torch.Tensor, index: Any, value: Any) -> None:
    if not _live(self) or not ops._any_device((self, index, value), {}):
        return _ITEM_WRITE(self, index, value)
    if isinstance(value, torch.Tensor) and not ops._tensors(index):
        ops.copy(_ITEM(self, index), value)
    else:
        ops._kernel("index_put_", _ITEM_WRITE, (self, index, value), {}, [self])
    return None


_EACH = ops.in_place("_foreach_copy_", torch._foreach_copy_)


def _each(targets: Any, sources: Any, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002 -- torch's
    targets, sources = list(targets), list(sources)
    if emulated() is None or getattr(raw, "on", False) or not ops._any_device((targets, sources), {}):
        _EACH(targets, sources, non_blocking)
    else:
        ops.copy_each(targets, sources, non_blocking=non_blocking)
