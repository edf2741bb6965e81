"""Conformance suites and fakes, for bcp and for third parties.

The suites need pytest and anyio's pytest plugin, so each is imported on first use.

Example::

    from bcp.testing import BackendSuite


    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend(self):
            return MyBackend()

"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bcp.testing.backend_suite import BackendSuite
    from bcp.testing.coordinator_suite import CoordinatorSuite
    from bcp.testing.planner_suite import PlannerSuite
    from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

__all__ = ["BackendSuite", "CoordinatorSuite", "CountingBackend", "FaultyBackend", "PlannerSuite"]

_MODULES = {
    "BackendSuite": "backend_suite",
    "CoordinatorSuite": "coordinator_suite",
    "CountingBackend": "storage_fakes",
    "FaultyBackend": "storage_fakes",
    "PlannerSuite": "planner_suite",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
