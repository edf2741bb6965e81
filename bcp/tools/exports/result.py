"""The figures of an export."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExportResult"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The figures of an export, as :func:`bcp.tools.export_hf` and its neighbours return them.

    Attributes:
        path: the folder or the file that was written.
        files: names of all files, relative to the folder; those of other ranks as well.
        tensors: how many tensors the files have. Names that share data count once where the format stores them once.
        nbytes: bytes of the elements of these tensors, without headers.
        seconds: from the call to the last file.

    Example:
        >>> _ = bcp.save("ckpt/figures", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> bcp.tools.export_safetensors("ckpt/figures", "ckpt/figures.safetensors", overwrite=True).nbytes
        40

    """

    path: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files):,} files"
        return f"{self.path}: {self.tensors:,} tensors, {self.nbytes:,} bytes in {files}, {self.seconds:.1f} s"
