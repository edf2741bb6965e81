"""Any value as bytes that ``torch.load(weights_only=True)`` reads, with the type that it had.

Containers, numbers and text are pickled as they are. Types that the restricted reader refuses, or gives back as
another type, become a *form*: a tuple of a mark, the form's name and its content, which is plain again.

Archives of ``torch.save`` from storage, checked before torch opens them: small ones could take gigabytes.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from bcp.errors import CheckpointError, StateError
from bcp.state.dtensor import torchs
from bcp.state.hooks import is_sharded_tensor
from bcp.state.native_values import take_apart, together
from bcp.state.tensor_specs import PLAIN

with suppress(ImportError):  # torch 2.6 has no such module
    import torch.utils.serialization.config  # torch.save would import it in the first save

__all__ = ["hex_number", "hex_text", "keeps_type", "pack", "unpack"]


def check_archive(data: io.BytesIO) -> None:
    """Check that the records of an archive are stored as they are, as ``torch.save`` does, and fit into it.

    torch inflates compressed records as well: 300 KB become 300 MB before it compares their size with the tensor's.
    Raises ValueError if a record is compressed, or records overlap.
    """
    if not zipfile.is_zipfile(data):
        return  # torch says what is wrong with it
    try:
        records = zipfile.ZipFile(data).infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"its directory is damaged: {error}") from error
    nbytes, most = sum(record.file_size for record in records), data.getbuffer().nbytes
    if nbytes > most or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(f"its {most} bytes would unpack to {nbytes} bytes, which torch.save does not write")


_MAPPINGS = (OrderedDict, Counter, defaultdict)
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, bytes, tuple, list, dict, set)}

_UNKNOWN = "?"
_MARK = "bcp"
_AS_IT_IS = frozenset({type(None), bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device})
_MOST_BITS = 2000
"""The restricted reader knows integers of up to 255 bytes."""

_MOST_HEX_DIGITS = 1 << 16
"""Integers with more digits are neither saved nor loaded: arithmetic with them takes time with the square of these."""

_LEAST_OUTSIDE = 4096
"""Bytes of a tensor that may stay outside of the archive."""

_WITHOUT_MEMORY = frozenset({"FakeTensor", "FunctionalTensor"})
"""By name: to import these classes takes longer than a save."""


def pack(
    obj: Any, where: str = "extra_states", *, allow_pickle: bool = False, outside: list[torch.Tensor] | None = None
) -> bytes:
    """Serialize a value into one byte object, with its types, bit by bit; ``where`` is its name in messages.

    Tensors become plain tensors of the CPU without autograd history: neither ``requires_grad`` nor the class
    ``Parameter`` is kept. Two references to one object become two objects. ``allow_pickle`` pickles objects of any
    class as well, which only :func:`unpack` with ``allow_pickle`` reads. ``outside`` takes the large tensors,
    contiguous ones of the CPU, without a copy; the bytes then lack these. Raises StateError, which names the value, if
    anything cannot be serialized, or could not be read again.
    """
    packer = _Packer(allow_pickle=allow_pickle, outside=outside)
    try:
        data = _saved({"value": packer.plain(obj, where)})
    except StateError:
        raise
    except RecursionError as error:
        raise StateError(f"{where} is nested too deep; does it contain itself? Pass plain values") from error
    except Exception as error:
        packer.blame(error)
        raise _unserializable(where, error) from error
    packer.check()
    return data


def unpack(
    data: bytes | bytearray | memoryview, *, allow_pickle: bool, where: str, outside: Sequence[torch.Tensor] = ()
) -> Any:
    """Read an image that :func:`pack` wrote; tensors are on the CPU. ``outside`` has the tensors that it left outside.

    ``allow_pickle`` unpickles anything, which may run code: only for checkpoints that you wrote. Raises CheckpointError
    if the bytes are damaged, or hold objects that only ``allow_pickle=True`` reads.
    """
    try:
        return _Reader(len(data), outside).whole(_loaded(data, allow_pickle=allow_pickle))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        refused = isinstance(error, UnpicklingError) and not allow_pickle
        advice = (
            "; if you wrote this checkpoint yourself, allow_pickle=True reads objects of any class" if refused else ""
        )
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {reason}{advice}") from error


def keeps_type(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping is stored with its type: dict, OrderedDict, Counter, and defaultdict of a builtin type."""
    kind = type(value)
    return kind is dict or (
        kind in _MAPPINGS and (not isinstance(value, defaultdict) or _factory(value) is not _UNKNOWN)
    )


def _factory(value: defaultdict[Any, Any]) -> str | None:
    """Return the name of the factory, None if there is none, or that of a factory that is not stored."""
    factory = value.default_factory
    return next((name for name, known in _FACTORIES.items() if known is factory), None if factory is None else _UNKNOWN)


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _loaded(data: bytes | bytearray | memoryview, *, allow_pickle: bool) -> Any:
    stream = io.BytesIO(data)
    check_archive(stream)
    stream.seek(0)
    # allow_pickle=True is the caller's word that the caller wrote the checkpoint; else no class is unpickled
    return torch.load(stream, map_location="cpu", weights_only=not allow_pickle)


class _Packer:
    """Makes values plain, and remembers those of which it is not known whether they can be serialized and read."""

    def __init__(self, *, allow_pickle: bool, outside: list[torch.Tensor] | None) -> None:
        self._allow_pickle = allow_pickle
        self._outside = outside
        self._doubtful: list[tuple[str, Any]] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._storages: set[int] = set()
        self._known: dict[type, Callable[[Any, str], Any]] = {
            int: self._int,
            bytes: self._bytes,
            list: self._items,
            tuple: self._tuple,
            dict: self._dict,
            **dict.fromkeys(_MAPPINGS, self._mapping),
        }

    def plain(self, value: Any, where: str) -> Any:
        """Return a value with every other type in it as a form; ``where`` names it."""
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind in self._known:
            return self._known[kind](value, where)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        parts = take_apart(value)
        return self._opaque(value, where) if parts is None else (_MARK, parts[0], self.plain(parts[1], where))

    def check(self) -> None:
        """Check that untrusted values can be read again. Raises StateError, which names the value and its class."""
        for where, value in () if self._allow_pickle else self._doubtful:
            try:
                kind = type(_loaded(_saved(value), allow_pickle=False))
            except Exception as error:
                raise _unreadable(value, where) from error
            if kind is not type(value):
                raise StateError(f"{where} is a {_name_of(value)} and would be loaded as a {kind}; pass plain values")

    def blame(self, error: Exception) -> None:
        """Raise StateError for the value that raised, if it does so by itself."""
        for where, value in (*self._doubtful, *self._tensors):
            try:
                _saved(value)
            except Exception as own:  # noqa: BLE001 -- whatever it is, it is told with the value's name
                raise _unserializable(where, own) from error

    def _int(self, value: int, where: str) -> Any:
        return value if value.bit_length() < _MOST_BITS else (_MARK, "int", hex_text(value, where))

    def _bytes(self, value: bytes, _: str) -> Any:
        return value or (_MARK, "bytes", bytearray())

    def _tuple(self, value: tuple[Any, ...], where: str) -> Any:
        items = self._items(value, where)
        return (_MARK, "tuple", items) if _looks_marked(value) else tuple(items)

    def _items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [
            value if type(value) in _AS_IT_IS else self.plain(value, f"{where}.{index}")
            for index, value in enumerate(values)
        ]

    def _dict(self, value: dict[Any, Any], where: str) -> Any:
        pairs = self._pairs(value, where)
        same = all(pair[0] is key for pair, key in zip(pairs, value, strict=True))
        return dict(pairs) if same else (_MARK, "dict", pairs)

    def _mapping(self, value: Any, where: str) -> Any:
        if not keeps_type(value):
            return self._opaque(value, where)
        pairs = self._pairs(value, where)
        more = _factory(value) if isinstance(value, defaultdict) else self.plain(vars(value), where)
        return _MARK, type(value).__name__, (pairs, more)

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        key_of = f"a key of {where}"
        return [[self.plain(key, key_of), self.plain(child, f"{where}.{key}")] for key, child in value.items()]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        """Return a tensor of the CPU that torch stores without other tensors' memory, or the form of one outside."""
        try:
            _check_memory(tensor, where)
            plain = tensor.detach().to("cpu")
            if self._outside is not None and _can_be_outside(plain):
                self._outside.append(plain)
                return _MARK, "outside", len(self._outside) - 1
            if _is_strided(plain):
                storage = plain.untyped_storage()
                shared = storage._cdata in self._storages  # noqa: SLF001 -- data_ptr() is 0 for every empty storage
                if shared or (storage.nbytes() != plain.nbytes and type(tensor) in PLAIN):
                    plain = plain.clone()
                self._storages.add(plain.untyped_storage()._cdata)  # noqa: SLF001 -- as above
                exotic = type(tensor) not in PLAIN
            else:
                exotic = True
        except StateError:
            raise
        except Exception as error:
            raise _unserializable(where, error) from error
        (self._doubtful if exotic else self._tensors).append((where, plain))
        return plain

    def _opaque(self, value: Any, where: str) -> Any:
        """Return a value that is pickled by itself, if at all."""
        if isinstance(value, torch.UntypedStorage):
            raise StateError(f"{where} is an UntypedStorage, which torch loads as a TypedStorage; pass a tensor of it")
        if not self._allow_pickle and isinstance(value, np.ndarray):
            raise _unreadable(value, where)
        self._doubtful.append((where, value))
        return value


def _can_be_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor is worth it, and its memory holds its values one after another."""
    is_plain = type(tensor) in PLAIN and _is_strided(tensor) and not (tensor.is_neg() or tensor.is_conj())
    return is_plain and tensor.nbytes >= _LEAST_OUTSIDE and tensor.is_contiguous()


def hex_text(number: int, where: str) -> str:
    """Return an integer in hexadecimal. Raises StateError, which names ``where``, if a load would not accept it."""
    if number.bit_length() > 4 * _MOST_HEX_DIGITS:
        raise StateError(
            f"{where} is an integer of {number.bit_length()} bits, more than {4 * _MOST_HEX_DIGITS}; save it as bytes"
        )
    return hex(number)


def hex_number(text: str) -> int:
    """Undo :func:`hex_text`. Raises ValueError if the text is no integer, or has too many digits."""
    if len(text) > _MOST_HEX_DIGITS + len("-0x"):
        raise ValueError(f"an integer has {len(text)} hexadecimal digits, at most {_MOST_HEX_DIGITS} are read")
    return int(text, 16)


def _looks_marked(value: tuple[Any, ...]) -> bool:
    return len(value) > 0 and type(value[0]) is str and value[0] == _MARK


def _check_memory(tensor: torch.Tensor, where: str) -> None:
    """Refuse a tensor whose values are not in memory here. Raises StateError, which tells the reason and the remedy."""
    if is_sharded_tensor(tensor) or isinstance(tensor, torchs("DTensor")):
        kind = type(tensor).__name__
        raise StateError(
            f"{where} is a {kind}; put it under states['model'], which reshards it, or pass its local tensor"
        )
    if is_lazy(tensor):
        raise StateError(f"{where} is uninitialized; run one forward pass of its lazy module first")
    if tensor.is_meta:
        raise StateError(f"{where} is on the meta device and has no values; materialise it with to_empty() first")
    if not _WITHOUT_MEMORY.isdisjoint(base.__name__ for base in type(tensor).__mro__):
        raise StateError(
            f"{where} is a {type(tensor).__name__}, which has no values; pass the tensor that it stands for"
        )
    if type(tensor) in PLAIN and _is_strided(tensor) and _too_short(tensor):
        raise StateError(
            f"{where} has lost its memory: its storage was resized to fewer bytes; pass a tensor that has it"
        )


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _too_short(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor reaches beyond the end of its storage."""
    steps = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + steps + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() < needed


LOADERS = "torchdata's StatefulDataLoader or a bcp.data.TokenLoader, which have a state"
"""What to save in place of torch's ``DataLoader``, in the words of messages."""

_ALLOW_PICKLE = "save with SaveOptions(allow_pickle=True) and load with LoadOptions(allow_pickle=True)"


def _name_of(value: object) -> str:
    """Return the class of a value with its module."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unreadable(value: object, where: str) -> StateError:
    """Return the error for a value that only ``allow_pickle=True`` would read."""
    if isinstance(value, np.ma.MaskedArray):
        return StateError(f"{where} is a masked array; pass its data and its mask, or {_ALLOW_PICKLE}")
    if isinstance(value, np.ndarray):
        return StateError(
            f"{where} is a {_name_of(value)} of dtype {value.dtype}, which only allow_pickle=True would read again; "
            f"pass a numpy.ndarray of numbers or text, or {_ALLOW_PICKLE}"
        )
    if isinstance(value, DataLoader):
        return StateError(f"{where} is a {_name_of(value)}, which has no state; pass {LOADERS}")
    return StateError(
        f"{where} is a {_name_of(value)}, which only allow_pickle=True would read again; pass plain values, "
        f"or {_ALLOW_PICKLE}"
    )


def _unserializable(where: str, error: Exception) -> StateError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return StateError(f"{where} cannot be serialized: {type(error).__name__}: {reason}; pass plain values")


class _Reader:
    """Undoes :meth:`_Packer.plain`.

    An honest archive has a byte at least for every value in it. A hostile one may hold one list in many places: 1.8 KB
    with 40 such levels would take 2^40 steps.
    """

    def __init__(self, nbytes: int, outside: Sequence[torch.Tensor]) -> None:
        self._nbytes = self._left = nbytes
        self._outside = outside

    def whole(self, archive: Any) -> Any:
        """Return the value of an archive."""
        if "arrays" in archive:  # it would be read with tensors in place of arrays
            raise ValueError("a development version before 0.1.0 stored its numpy arrays; load it with such a version")
        return self.value(archive["value"])

    def value(self, data: Any) -> Any:
        """Return the value of plain data."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"its {self._nbytes} bytes name more values than they can hold")
        kind = type(data)
        if kind is list:
            return [self.value(child) for child in data]
        if kind is dict:
            return {key: self.value(child) for key, child in data.items()}
        if kind is not tuple:
            return data
        if not _looks_marked(data):
            return tuple(map(self.value, data))
        _, name, content = data
        content = self.value(content)
        if name == "outside":
            return self._outside[content]
        return _COLLECTIONS[name](content) if name in _COLLECTIONS else together(name, content)


def _with_attributes(made: Any, attributes: Mapping[str, Any]) -> Any:
    vars(made).update(attributes)
    return made


_COLLECTIONS: dict[str, Any] = {
    "int": hex_number,
    "bytes": bytes,
    "tuple": tuple,
    "dict": dict,
    "OrderedDict": lambda content: _with_attributes(OrderedDict(content[0]), content[1]),
    "Counter": lambda content: _with_attributes(Counter(dict(content[0])), content[1]),
    "defaultdict": lambda content: defaultdict(_FACTORIES.get(content[1]), content[0]),
}
