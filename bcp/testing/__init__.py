"""Conformance suites and fakes, for bcp and for third parties.

The suites need pytest and anyio's pytest plugin, so each is imported on first use.

Example::

    from bcp.testing import BackendSuite


    class TestMyBackend(BackendSuite):
        @pytest.fixture
        def backend(self):
            return MyBackend()

"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.testing.backend_suite import BackendSuite
    from bcp.testing.coordinator_suite import CoordinatorSuite
    from bcp.testing.planner_suite import PlannerSuite
    from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

__all__ = ["BackendSuite", "CoordinatorSuite", "CountingBackend", "FaultyBackend", "PlannerSuite"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.testing.backend_suite": ["BackendSuite"],
            "bcp.testing.coordinator_suite": ["CoordinatorSuite"],
            "bcp.testing.planner_suite": ["PlannerSuite"],
            "bcp.testing.storage_fakes": ["CountingBackend", "FaultyBackend"],
        },
        __all__,
    )
