"""How to save and how to load; frozen, keyword-only. The only room that reads environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard, TypeVar

import numpy as np

from bcp.errors import InputError
from bcp.events import Observer, ignore
from bcp.pipeline import Pipeline
from bcp.plan.read.renames import Rename, blocks_of
from bcp.protocols import Codec, RetryPolicy

__all__ = ["Graph", "LoadOptions", "SaveOptions", "timeout_of", "with_overrides"]

MIB = 1 << 20
MAX_NICE = 19
DEFAULT_TIMEOUT = 120.0
MOST_METADATA = 64 << 10
"""The most bytes of the caller's own facts, as JSON."""

Graph = Pipeline[Any, Any]
"""A save or load graph, as ``SaveOptions(edit=...)`` and ``LoadOptions(edit=...)`` get and return it."""
O = TypeVar("O", "SaveOptions", "LoadOptions")  # noqa: E741 -- O for options, as in the design


def _workers() -> int | None:
    """Return ``$BCP_IO_WORKERS``; None if it is not set."""
    if not os.environ.get("BCP_IO_WORKERS"):
        return None
    number = float(_number("BCP_IO_WORKERS", 4))
    if not number.is_integer():
        raise InputError(f"$BCP_IO_WORKERS is {number}, which is no number of threads; unset it, or set a whole one")
    return int(number)


def _timeout() -> float:
    return _number("BCP_TIMEOUT", DEFAULT_TIMEOUT)


def _record() -> bool:
    """Return whether ``$BCP_RECORD`` is anything but 0."""
    text = os.environ.get("BCP_RECORD", "")
    if text not in ("", "0", "1"):
        raise InputError(f"$BCP_RECORD is {text!r}; unset it, or set 0 for no recordings")
    return text != "0"


def _record_load() -> bool | None:
    """Return what ``$BCP_RECORD`` says; None if it is not set."""
    is_recorded = _record()
    return is_recorded if os.environ.get("BCP_RECORD") else None


def _number(variable: str, fallback: float) -> float:
    """Return the number in an environment variable."""
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else fallback
    except ValueError as error:
        raise InputError(f"${variable} is {text!r}, which is no number; unset it, or set one") from error


def unchanged(graph: Graph) -> Graph:
    """Leave the graph as it is."""
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of saves.

    Attributes:
        overwrite: replace a committed checkpoint at the same path, atomically; without it such a save is refused
            before a byte is written.
        progress: draw a progress bar on rank 0 (needs ``bcp-checkpoint[cli]``).
        edit: takes the save graph and returns the one to run, as in ``lambda g: g.after("d2h", my_stage)``. The
            stages are ``d2h``, ``serialize``, one per codec, ``upload`` and ``checksum``. A save that refers to an
            earlier one (``Run(since="auto")``) has ``d2h``, ``serialize``, ``checksum``, ``keep``, ``place`` and
            ``upload``.
        codecs: applied to every part in this order, before it is stored.
        balance: how replicated tensors are divided over the ranks that hold them. ``"split"`` cuts them, and every rank
            writes the same number of bytes. ``"worst-fit"`` gives whole shards to the least loaded rank (sec. 4.1).
        budget_bytes: staging memory. None: the size of the rank's own state for an asynchronous save, so the snapshot
            never waits for storage; 8 parts for a synchronous save. A smaller budget saves memory, and training waits
            longer; the report has the waiting time. A budget for all the data may be exceeded by the headers of the
            files, some hundred bytes a tensor.
        pinned_bytes: most of the staging memory that may be page-locked, per process, if tensors are on a device; 0 for
            none. None: 16 GiB, and no more than a quarter of the host's memory for all ranks of the host together
            (``$LOCAL_WORLD_SIZE``). Parts beyond it go to ordinary memory. Copies to locked memory run at the speed of
            the bus, others at a third to a half of it. Other processes of the host cannot use locked memory. It is kept
            for the next save (see ``docs/gpu.md``).
        part_bytes: data files are staged and written in parts of this size; a multiple of 1 MiB, 32 to 64 MiB is best.
        io_workers: parts that are written at once, by as many threads. None: ``$BCP_IO_WORKERS``, else as many as suit
            the storage: 8 for GCS and S3, 4 for all others.
        copy_workers: parts that are copied to the host at once. With three, two cores have always something to copy:
            that is 10 % faster than two.
        snapshot: ``"eager"``: an asynchronous save returns when the state is in host memory (sec. 4.2). ``"lazy"``: it
            returns at once. Parameters and optimizer states are copied while forward and backward run, and the
            optimizer's next step waits for the remaining copies. Needs ``async_checkpoint=True`` and the optimizer in
            the states. Any other change of parameters before that step makes the save fail (see ``guard``).
        nice: added to the niceness of the threads that copy, digest and write, 0 to 19: with 19 they run where
            training leaves a core idle.
        ionice: I/O priority of these threads: ``"best-effort"`` (its lowest level), ``"idle"``, None for the
            process's. For local disks whose scheduler knows priorities.
        timeout: seconds that a rank may be silent or late before the others give it up. ``$BCP_TIMEOUT``, else 120.
        replicas: what happens if ranks hold different values of a tensor that they should hold alike (a BatchNorm's
            buffers, parameters between two averages of local SGD). A sample of the values is compared. ``"warn"``: log
            a warning, and save the values of the lowest rank, whole. ``"error"``: raise a
            :class:`~bcp.errors.StateError` before a byte is written. ``"ignore"``: compare nothing; such a tensor may
            become a mixture of several ranks' rows. The same on every rank.
        guard: raise :class:`~bcp.errors.StateChangedError` if a tensor is written to while its snapshot is taken. All
            writes that autograd counts are seen. Other writes (through ``.data``, numpy, a raw pointer) to host memory
            are seen if they change a byte of a sample. The sample of a tensor has 2 to 64 blocks of 64 bytes, evenly
            spaced. An optimizer step is seen; a write to a few rows of a large tensor may go unseen. False: nothing is
            compared.
        allow_pickle: pickle objects of any class in extra states, dataloader states and values. The load then needs
            ``LoadOptions(allow_pickle=True)``. Without it such an object is a :class:`~bcp.errors.StateError`.
        storage_options: for the file system of a URL, by the names that fsspec and its packages give them, as in
            ``{"endpoint_url": ...}``. Environment variables and configuration files of these count without them. They
            may be secret, so they are shown nowhere.
        retries: how failed requests to an object store are made again; None for the defaults of
            :class:`~bcp.protocols.RetryPolicy`.
        record: leave a file with the events of all ranks in ``telemetry/`` of the checkpoint, for :func:`bcp.report`.
            It is written after the commit, and no save fails by it; one that fails leaves one with its reasons. The
            same on every rank. True, unless ``$BCP_RECORD`` is 0.
        step: the training step, for traces, log lines and reports. None: the number at the end of the path's last name.
        metadata: your own facts of the checkpoint, as in ``{"git": "4f1c9e2", "tokens": 10**12}``: a dict of JSON
            values, 64 KiB at most. They are committed with it, and ``bcp.Checkpoint(path).user_metadata`` has them.
            Those of rank 0 count.
        observe: called with every :data:`~bcp.events.Event` on this rank.

    Example::

        options = bcp.SaveOptions(part_bytes=64 << 20, nice=10)
        bcp.save("ckpt/step-200", states, options=options)

    """

    overwrite: bool = False
    progress: bool = False
    edit: Callable[[Graph], Graph] = unchanged
    codecs: Sequence[Codec] = ()
    balance: Literal["split", "worst-fit"] = "split"
    budget_bytes: int | None = None
    pinned_bytes: int | None = None
    part_bytes: int = 32 * MIB
    io_workers: int | None = field(default_factory=_workers)
    copy_workers: int = 3
    snapshot: Literal["eager", "lazy"] = "eager"
    nice: int = 0
    ionice: Literal["best-effort", "idle"] | None = None
    timeout: float = field(default_factory=_timeout)
    replicas: Literal["warn", "error", "ignore"] = "warn"
    guard: bool = True
    allow_pickle: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retries: RetryPolicy | None = None
    record: bool = field(default_factory=_record)
    step: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    observe: Observer = ignore

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", _facts(self.metadata))
        _true_or_false(self, "overwrite", "progress", "guard", "allow_pickle", "record")
        _positive(self, "part_bytes", "io_workers", "copy_workers", "timeout")
        _whole_mib(self, "part_bytes")
        _functions(self)
        _storage(self)
        if self.budget_bytes is not None:  # else the rank's own state
            _positive(self, "budget_bytes")
        if not (_is_whole(self.pinned_bytes) and self.pinned_bytes == 0) and self.pinned_bytes is not None:
            _positive(self, "pinned_bytes")
        _one_of(self, "balance", ("split", "worst-fit"))
        _one_of(self, "snapshot", ("eager", "lazy"))
        _one_of(self, "replicas", ("warn", "error", "ignore"))
        _one_of(self, "ionice", ("best-effort", "idle", None))
        if not (_is_whole(self.nice) and 0 <= self.nice <= MAX_NICE):
            raise InputError(
                f"nice={self.nice!r} is not within 0 and {MAX_NICE}; pass a whole number, for no library may ask for "
                "more than its share"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of loads.

    Attributes:
        strict: names must be the same in checkpoint and target, within the kinds that are loaded. In mappings of
            ``extra_states`` and ``dataloader``, the checkpoint must have all top-level keys of the target; those that
            the target lacks are added to it. Without ``strict``, common names are loaded and the report lists the rest;
            if a kind has none in common, a :class:`~bcp.errors.NothingLoadedWarning` says so.
        overlap_loading: ranks that need the same bytes read them once, and send them to each other while reading goes
            on (paper sec. 4.1, Fig. 10). False: every rank reads all its bytes itself.
        rename: the target's names of the checkpoint's model tensors. A dict maps names in the checkpoint to names in
            the target. Pairs of (regular expression, replacement) are applied one after another with ``re.sub``. A
            function takes a name and returns one. An object with a method ``blocks`` can also cut and join tensors
            (:class:`~bcp.plan.read.renames.Moves`). Names that a dict does not have stay; None in place of a name
            leaves the tensor out. Optimizer states and hyper-parameters follow. The same on every rank.
        cast: convert dtypes that differ. False: a different dtype is an error.
        verify: check the checksum of every block that is read.
        allow_pickle: unpickle objects of any class, which may run code. Only for checkpoints that you wrote, with
            ``SaveOptions(allow_pickle=True)``.
        progress: draw a progress bar on rank 0 (needs ``bcp-checkpoint[cli]``).
        edit: takes the load graph and returns the one to run. The stages are ``read``, ``deserialize``,
            ``h2d`` and ``exchange``.
        codecs: those that the checkpoint was saved with; the order does not matter.
        budget_bytes: host memory for bytes between storage and tensors.
        read_bytes: the largest single read; a multiple of 1 MiB.
        exchange: transport of the chunks that ranks read for each other. ``"sockets"``: connections of bcp's own.
            ``"gloo"``: over a gloo group that lives as long as the load. ``"nccl"``: a chunk is copied to the reader's
            current CUDA device and sent from device to device. ``"nccl"`` has never been run. The last two need
            ``torch.distributed``, and are not encrypted. The same on every rank. Without effect for one rank.
        exchange_bytes: most bytes that one rank receives in one all-to-all round.
        io_workers: reads in flight, in as many threads. None: ``$BCP_IO_WORKERS``, else as many as suit the storage: 8
            for GCS and S3, 4 for all others.
        copy_workers: parts that are verified, decoded or copied to the device at once.
        timeout: seconds that a rank may be silent or late before the others give it up. ``$BCP_TIMEOUT``, else 120.
        storage_options: for the file system of a URL, by the names that fsspec and its packages give them, as in
            ``{"endpoint_url": ...}``. Environment variables and configuration files of these count without them. They
            may be secret, so they are shown nowhere.
        retries: how failed requests to an object store are made again; None for the defaults of
            :class:`~bcp.protocols.RetryPolicy`.
        cold: where data files of a run's checkpoint may lie after :func:`bcp.cool`. ``"run"``: where the run's folder
            says. A URL or path: the cold place of the run, in the place of what the folder says. None: nowhere, for
            runs of people whom you do not trust. It is asked for files that are missing in the folder.
        record: leave a file with the events of all ranks in ``telemetry/`` of the checkpoint, for :func:`bcp.report`.
            No load fails by it. None: loads of training jobs leave one. A load that leaves out the optimizer of the
            checkpoint, as evaluation and export do, is that of a reader, and writes nothing. A checkpoint whose folder
            or ``metadata.arrow`` nobody may write to is sealed, and gets none, whatever the option says. The same on
            every rank. ``$BCP_RECORD`` set to 0 or 1 stands for False or True.
        step: the training step, for traces, log lines and reports. None: the number at the end of the path's last name.
        observe: called with every :data:`~bcp.events.Event` on this rank.

    Example::

        options = bcp.LoadOptions(cast=True, read_bytes=64 << 20)
        bcp.load("ckpt/step-100", states, options=options)

    """

    strict: bool = True
    overlap_loading: bool = True
    rename: Rename = None
    cast: bool = False
    verify: bool = True
    allow_pickle: bool = False
    progress: bool = False
    edit: Callable[[Graph], Graph] = unchanged
    codecs: Sequence[Codec] = ()
    budget_bytes: int = 512 * MIB
    read_bytes: int = 32 * MIB
    exchange: Literal["sockets", "gloo", "nccl"] = "sockets"
    exchange_bytes: int = 256 * MIB
    io_workers: int | None = field(default_factory=_workers)
    copy_workers: int = 2
    timeout: float = field(default_factory=_timeout)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retries: RetryPolicy | None = None
    cold: str | None = "run"
    record: bool | None = field(default_factory=_record_load)
    step: int | None = None
    observe: Observer = ignore

    def __post_init__(self) -> None:
        _true_or_false(self, "strict", "overlap_loading", "cast", "verify", "allow_pickle", "progress")
        if self.record is not None:
            _true_or_false(self, "record")
        _positive(self, "budget_bytes", "read_bytes", "exchange_bytes", "io_workers", "copy_workers", "timeout")
        _whole_mib(self, "read_bytes")
        _one_of(self, "exchange", ("sockets", "gloo", "nccl"))
        if self.cold is not None and (not isinstance(self.cold, str) or not self.cold):
            raise InputError(f"cold={self.cold!r}: pass 'run', the path or URL of a cold place, or None for nowhere")
        _functions(self)
        _storage(self)
        blocks_of(self.rename)


def _storage(options: SaveOptions | LoadOptions) -> None:
    """Refuse settings of the storage that cannot be any."""
    if not isinstance(options.storage_options, Mapping):
        raise InputError(f"storage_options is a {type(options.storage_options).__name__}; pass a dict")
    if not isinstance(options.retries, RetryPolicy | None):
        raise InputError(f"retries={options.retries!r}; pass a bcp.RetryPolicy, or None for the defaults")


def _true_or_false(options: object, *names: str) -> None:
    """Raise InputError for the first of these fields that is neither True nor False."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"{name}={value!r} is a {type(value).__name__}; pass True or False")


def _one_of(options: object, name: str, known: Sequence[str | None]) -> None:
    value = getattr(options, name)
    if not (value is None or isinstance(value, str)) or value not in known:
        raise InputError(f"{name}={getattr(options, name)!r} is unknown; use {' or '.join(map(repr, known))}")


def _whole_mib(options: object, name: str) -> None:
    if getattr(options, name) % MIB:
        raise InputError(f"{name}={getattr(options, name)} is not a multiple of 1 MiB ({MIB}); round it")


def _functions(options: SaveOptions | LoadOptions) -> None:
    """Raise InputError if ``edit`` or ``observe`` cannot be called, a codec is none, or ``step`` is no number."""
    for name in ("edit", "observe"):
        if not callable(getattr(options, name)):
            raise InputError(f"{name}={getattr(options, name)!r} cannot be called; pass a function, or leave it out")
    if not isinstance(options.codecs, Iterable) or isinstance(options.codecs, str | bytes | Mapping):
        raise InputError(f"codecs={options.codecs!r} is no sequence; pass a list of bcp.extend.Codec, [] for none")
    for codec in options.codecs:
        if not isinstance(codec, Codec):
            raise InputError(
                f"codecs has {codec!r}, which is no bcp.extend.Codec; pass bcp.extend.Codec(name, encode, decode)"
            )
    if options.step is not None and not _is_whole(options.step):
        raise InputError(f"step={options.step!r} is no whole number; pass the number of the step, or None")


def _facts(metadata: object) -> Mapping[str, Any]:
    """Return a copy of the caller's facts. Raises InputError unless JSON gives the same values back."""
    if not isinstance(metadata, Mapping):
        raise InputError(f"metadata is a {type(metadata).__name__}; pass a dict, as {{'git': '4f1c9e2'}}")
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        json.dumps(dict(metadata), ensure_ascii=False).encode()  # no lone surrogates
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"metadata cannot be written as JSON: {error}; use strings, finite numbers, lists and dicts"
        ) from error
    if len(text) > MOST_METADATA:
        raise InputError(f"metadata has {len(text)} bytes as JSON, and {MOST_METADATA} is the most; use extra_states")
    facts: dict[str, Any] = json.loads(text)
    for name, value in metadata.items():
        if name not in facts or facts[name] != value:
            raise InputError(
                f"metadata[{name!r}] is {str(value)[:100]}, and comes back from JSON as something else; use dicts with "
                "strings as keys, and lists in the place of tuples"
            )
    return facts


def with_overrides(kind: type[O], options: O | None, overrides: Mapping[str, object]) -> O:
    """Return the options, None for the defaults, with those keywords replaced that are not None.

    Raises:
        InputError: the options are of another kind, or a value is none of those that are allowed.

    """
    if options is not None and not isinstance(options, kind):
        raise InputError(f"options is a {type(options).__name__}; pass bcp.{kind.__name__}(...) with the same keywords")
    options = kind() if options is None else options
    return replace(options, **{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]  # names are the callers' own keywords


def timeout_of(options: object) -> float:
    """Return the timeout in seconds of a call whose arguments, the options perhaps among them, were refused."""
    if isinstance(options, SaveOptions | LoadOptions):
        return options.timeout
    try:
        return LoadOptions().timeout
    except InputError:  # of an environment variable
        return DEFAULT_TIMEOUT


def _positive(options: object, *names: str) -> None:
    """Raise :class:`~bcp.errors.InputError` for the first of these fields that is no whole number above zero.

    ``timeout`` may have fractions, and ``io_workers`` may be None.
    """
    for name in names:
        value = getattr(options, name)
        if value is None and name == "io_workers":
            continue
        description, is_kind = ("number", _is_number) if name == "timeout" else ("whole number", _is_whole)
        if not is_kind(value):
            raise InputError(f"{name}={value!r} must be a {description}")
        if not value > 0:
            raise InputError(f"{name}={value} must be positive")


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
