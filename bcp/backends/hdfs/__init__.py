"""HDFS: ``hdfs://host:port/path`` and ``hdfs://nameservice/path``.

Needs the extra ``hdfs``. Data moves through hdfs-native, which is written in Rust and needs no Java. Large objects are
written as concurrent sub-files and concatenated by the NameNode, see :mod:`bcp.backends.hdfs.subfiles`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from bcp.backends.hdfs.client import Hdfs, Settings
from bcp.backends.hdfs.cluster import find_cluster
from bcp.backends.hdfs.store import HdfsStore, as_root
from bcp.backends.objects import ObjectBackend
from bcp.errors import InputError, MissingExtraError
from bcp.protocols import RetryPolicy
from bcp.runtime.imports import importing

__all__ = ["open_hdfs", "register"]

_OPTIONS = ("block_bytes", "replication", "concat", "seconds")


def open_hdfs(url: str, options: Mapping[str, Any], policy: RetryPolicy | None = None) -> ObjectBackend:
    """Return the backend of an ``hdfs://`` URL. Connects with the first request.

    Args:
        url: ``hdfs://host:port/path``; a name service of the Hadoop configuration in place of the host; or
            ``hdfs:///path`` for ``fs.defaultFS``.
        options: those of :class:`~bcp.backends.hdfs.client.Settings`; ``config``: Hadoop settings by their names, which
            count before those of files; ``config_dir``: folder of ``core-site.xml`` and ``hdfs-site.xml``, in place of
            ``$HADOOP_CONF_DIR``.
        policy: how failed requests are made again; None for the defaults.

    Raises:
        InputError: the URL or an option is wrong.
        MissingExtraError: hdfs-native is not installed.

    Example::

        backend = open_hdfs("hdfs://namenode:8020/runs/7", {"replication": 2})

    """
    if importlib.util.find_spec("hdfs_native") is None:
        raise MissingExtraError("hdfs:// needs hdfs-native: pip install 'bcp-checkpoint[hdfs]'")
    unknown = sorted(set(options) - {*_OPTIONS, "config", "config_dir"})
    if unknown:
        raise InputError(f"storage_options has {unknown}; hdfs:// knows config, config_dir, {', '.join(_OPTIONS)}")
    authority, _, path = url.partition("://")[2].partition("/")
    config = {str(name): str(value) for name, value in (options.get("config") or {}).items()}
    cluster = find_cluster(authority, config, options.get("config_dir"))
    settings = Settings(**{name: options[name] for name in _OPTIONS if name in options})
    return ObjectBackend(HdfsStore(Hdfs(cluster, settings, options.get("config_dir")), as_root(path)), policy)


def register() -> None:
    """Let fsspec open ``hdfs://`` URLs by :class:`~bcp.backends.hdfs.filesystem.HdfsFileSystem` from now on.

    A call of its own, and neither an entry point nor done at import: fsspec's own choice for the scheme is pyarrow's,
    and other code of the process, or of the environment, may rely on that.

    Example::

        bcp.backends.hdfs.register()
        with fsspec.open("hdfs://namenode:8020/runs/7/model/0.safetensors") as file:
            ...

    """
    with importing:
        import fsspec  # noqa: PLC0415 -- as in bcp.backends

    fsspec.register_implementation("hdfs", "bcp.backends.hdfs.filesystem.HdfsFileSystem", clobber=True)
