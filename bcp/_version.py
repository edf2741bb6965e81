"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("bcp-checkpoint")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"
