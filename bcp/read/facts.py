"""The facts of a checkpoint that its table of contents has: what :class:`bcp.Checkpoint` shows without reading data."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from bcp._text import printable
from bcp.errors import CorruptError, FqnMismatchError, InputError
from bcp.format.metadata import METADATA_KEY, Metadata
from bcp.plan.shards import KINDS
from bcp.read.contents import Place, TensorInfo, Tensors, places_of
from bcp.telemetry.amounts import bytes_words
from bcp.telemetry.watch import step_of

__all__ = ["Facts"]

SHOWN = 40
"""Tensors in the table of a notebook."""


class Facts:
    """Facts of an open checkpoint; both classes of checkpoints have them."""

    path: str

    @property
    def metadata(self) -> Metadata:
        """The table of contents, decoded: layout and commit record (``docs/format.md``)."""
        raise NotImplementedError

    @property
    def step(self) -> int | None:
        """The number at the end of the path, as in ``run/step-00001000``; None if there is none."""
        return step_of(self.path)

    @property
    def operation(self) -> str:
        """Id of the save: 16 hex digits in the names of all files of a checkpoint. An edit gives it another one.

        Files of another library have no such id, and get a digest of places and shapes. An import without a copy gives
        them an id.
        """
        return self.metadata.commit.operation

    @property
    def created(self) -> datetime:
        """When it was committed, or imported, in UTC; the year 1970 for other files of other libraries.

        Raises CorruptError if the commit record has no time.
        """
        text = self.metadata.commit.created
        if self.metadata.foreign is not None and not text:
            return datetime.fromtimestamp(0, UTC)
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise CorruptError(
                f"{self.path}/{METADATA_KEY} says that it was committed at {text[:40]!r}, which is no time; restore it"
            ) from error

    @property
    def framework(self) -> str:
        """Name of the planner that read the state, or of the format of another library, as in ``"safetensors"``."""
        return self.metadata.commit.framework

    @property
    def version(self) -> str:
        """Version of the bcp that saved it."""
        return self.metadata.commit.version

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that reading needs; empty as a rule."""
        return self.metadata.commit.codecs

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers that the run has noted for the step."""
        return self.metadata.commit.metrics

    @property
    def user_metadata(self) -> Mapping[str, Any]:
        """The caller's own facts of the save: ``SaveOptions(metadata=...)``."""
        return self.metadata.commit.user

    @property
    def refers(self) -> tuple[int, ...]:
        """Steps of the run whose checkpoints have some of its blocks, ascending; empty for a whole checkpoint.

        It can be read as long as these checkpoints are there. ``bcp.Run(since="auto")`` saves so, and keeps them.
        """
        return self.metadata.commit.refers

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.metadata.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of all its data, without headers and metadata; data that several names share counts once."""
        return self.metadata.nbytes

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that it has, of model, optimizer, dataloader and extra_states."""
        layout = self.metadata.layout
        codes = {*layout.tensors.kind.tolist(), *layout.extra_kind.tolist()}
        named = {kind for kind, _ in layout.objects}
        return tuple(kind for code, kind in enumerate(KINDS) if code in codes or kind in named)

    @property
    def tensors(self) -> Tensors:
        """All tensors by (kind, name). Nothing is read."""
        return Tensors(self.metadata.layout)

    def names(self, kind: str = "model", glob: str = "*") -> list[str]:
        """Return the names of tensors of a kind that match a pattern of the shell, sorted.

        Raises InputError for an unknown kind.

        Example:
            >>> import torch
            >>> _ = bcp.save("ckpt/names", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
            >>> bcp.Checkpoint("ckpt/names").names(glob="*ias")
            ['bias']

        """
        check_kind(kind)
        tensors = self.tensors
        return [tensors.info(row).name for row in tensors.rows(kind, glob)]

    def places(self, name: str, kind: str = "model") -> list[Place]:
        """Return the places of a tensor's bytes: files, and byte ranges of their data sections. Nothing is read.

        Data files are safetensors files, so a reader of these finds the bytes, too (``docs/format.md``). If the
        checkpoint has blocks in other steps (:attr:`refers`), they are places in the files that ``bcp cp`` would make.

        Raises FqnMismatchError if the checkpoint has no such tensor.

        Example:
            >>> bcp.Checkpoint("ckpt/step-100").places("bias")[0].stop
            32

        """
        return places_of(self.metadata, self._row(kind, name))

    def __getitem__(self, name: str | tuple[str, str]) -> TensorInfo:
        """Return the record of a tensor, by its name in the model, or by (kind, name)."""
        kind, name = ("model", name) if isinstance(name, str) else name
        return self.tensors.info(self._row(kind, name))

    def __contains__(self, name: object) -> bool:
        key = ("model", name) if isinstance(name, str) else name
        return key in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _row(self, kind: str, name: str) -> int:
        """Return the row of a tensor in the layout. Raises FqnMismatchError if there is none."""
        check_kind(kind)
        row = self.tensors.row(kind, name)
        if row is None:
            raise FqnMismatchError(self._lacks(kind, name))
        return row

    def _lacks(self, kind: str, name: str) -> str:
        """Say that a tensor is not there, and under which names it might be."""
        others = [other for other, known in self.tensors if known == name]
        if others:
            return f"{self.path} has no {kind} tensor {name!r}, and {others[0]} has one: pass kind={others[0]!r}"
        ending = name.rpartition(".")[2]
        near = [known for other, known in self.tensors if other == kind and known.endswith(ending)][:3]
        hint = f"; it has {', '.join(map(repr, near))}" if near else ""
        return f"{self.path} has no {kind} tensor {name!r}{hint}; names() lists all of them"

    def __repr__(self) -> str:
        return "\n".join([self._head(), *(f"  {line}" for line in self._lines())])

    def _head(self) -> str:
        if self.metadata.foreign is not None:
            created = self.metadata.commit.created[:19]
            imported = f", imported without a copy at {created} UTC" if created else ""
            what = f"files of {self.framework}, without checksums{imported}"
            return printable(f"<Checkpoint {self.path}: {bytes_words(self.nbytes)}, {what}>")
        by = f"saved by {self.world_size} ranks of {self.framework} at {self.metadata.commit.created[:19]} UTC"
        refers = f", with blocks of steps {', '.join(map(str, self.refers))}" if self.refers else ""
        return printable(
            f"<Checkpoint {self.path}: {bytes_words(self.nbytes)}, {by}, operation {self.operation}{refers}>"
        )

    def _lines(self) -> list[str]:
        """Return a line for each kind."""
        layout = self.metadata.layout
        nbytes = layout.tensors.numel * layout.tensors.itemsize
        lines = []
        for code, kind in enumerate(KINDS):
            own, values = layout.tensors.kind == code, sum(other == kind for other, _ in layout.objects)
            ranks = int((layout.extra_kind == code).sum())
            parts = [f"{int(own.sum()):,} tensors, {bytes_words(int(nbytes[own].sum()))}"] if own.any() else []
            parts += [f"{values:,} values"] if values else []
            parts += [f"one object of each of {ranks:,} ranks"] if ranks else []
            lines += [f"{kind}: {', '.join(parts)}"] if parts else []
        return lines

    def _repr_html_(self) -> str:
        tensors = self.tensors
        rows = "".join(
            f"<tr><td>{each.kind}</td><td>{_escaped(each.name)}</td><td>{_escaped(each.dtype)}</td>"
            f"<td>{list(each.shape)}</td><td>{each.nbytes:,}</td></tr>"
            for each in map(tensors.info, range(min(len(tensors), SHOWN)))
        )
        more = f"<p>and {len(tensors) - SHOWN:,} more tensors</p>" if len(tensors) > SHOWN else ""
        head = "<tr><th>kind</th><th>name</th><th>dtype</th><th>shape</th><th>bytes</th></tr>"
        return f"<pre>{_escaped(repr(self))}</pre><table>{head}{rows}</table>{more}"


def _escaped(text: str) -> str:
    """Return a text as HTML, without characters that command a terminal."""
    return html.escape(printable(text, "\n"))


def check_kind(kind: str) -> None:
    """Raise InputError for a kind that is none."""
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} is unknown; kinds are {', '.join(KINDS)}")


def check_nbytes(name: str, value: object) -> None:
    """Raise InputError for an argument that is no positive number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r}: pass a positive number of bytes")
