"""Object stores: one backend over many kinds of stores, each of which only knows how to make single requests."""

from bcp.backends.objects.backend import ObjectBackend
from bcp.backends.objects.retry import Retries
from bcp.backends.objects.store import ConditionError, If, RequestError, Stat, Store, Upload
from bcp.protocols import RetryPolicy

__all__ = [
    "ConditionError",
    "If",
    "ObjectBackend",
    "RequestError",
    "Retries",
    "RetryPolicy",
    "Stat",
    "Store",
    "Upload",
]
