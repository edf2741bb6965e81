"""Archives of ``torch.save`` from storage, checked before torch opens them: small ones could take gigabytes."""

from __future__ import annotations

import io
import zipfile

__all__ = ["check_archive"]


def check_archive(data: io.BytesIO) -> None:
    """Check that the records of an archive are stored as they are, as ``torch.save`` does, and fit into it.

    torch inflates compressed records as well: 300 KB become 300 MB before it compares their size with the tensor's.

    Raises:
        ValueError: a record is compressed, or records overlap.

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
