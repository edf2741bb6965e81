"""Every scenario of the GPU tests, by name.

``tests/gpu`` runs them on a device; ``tests/device/test_gpu_tests.py`` runs them on the emulation, at a small scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from gpu.scenarios import graphs, lifetime, order, sharded, values
from gpu.scenarios.scale import EMULATED, GPU, Scale

__all__ = ["EMULATED", "GPU", "SCENARIOS", "Scale", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One test of the device path.

    Attributes:
        name: how reports call it.
        run: does it in an empty folder, and raises if it fails.
        devices: how many it needs.
        emulated: whether the emulation can express it.
    """

    name: str
    run: Callable[[Path, Scale], None]
    devices: int = 1
    emulated: bool = True


def _stream(*, own: bool) -> str:
    return "own stream" if own else "default stream"


def _written() -> list[Scenario]:
    return [
        Scenario(
            f"written before and after a save: {kind}, {_stream(own=own)}",
            partial(order.written_before_and_after, kind=kind, own=own),
        )
        for kind, own in product(("model", "extra", "stateful", "conjugate"), (False, True))
    ]


def _captures() -> list[Scenario]:
    return [
        Scenario(
            f"capture during a save: {mode}, {snapshot}",
            partial(graphs.capture_during_a_save, mode=mode, snapshot=snapshot),
        )
        for mode, snapshot in product(("relaxed", "thread_local", "global"), ("eager", "lazy"))
    ]


SCENARIOS = [
    Scenario("model and optimizer", values.model_and_optimizer),
    Scenario("layouts and dtypes", values.layouts_and_dtypes),
    Scenario("from host to device and back", values.from_host_to_device_and_back),
    Scenario("work of two streams", values.work_of_two_streams),
    Scenario("work of another device", values.work_of_another_device, devices=2),
    Scenario("current device of a Stateful", values.current_device_of_a_stateful, devices=2),
    *_written(),
    *(
        Scenario(
            f"trained before and after a save: {_stream(own=own)}",
            partial(order.trained_before_and_after, own=own),
        )
        for own in (False, True)
    ),
    Scenario("lazy beside forward and backward", order.lazy_beside_forward_and_backward),
    Scenario("a step waits for late copies", order.a_step_waits_for_late_copies),
    Scenario("kernel after a load", order.kernel_after_a_load),
    Scenario("kernel after a load with hooks", order.kernel_after_a_load_with_hooks),
    Scenario("kernel after a load of a learning rate", order.kernel_after_a_load_of_a_learning_rate),
    Scenario("first load of a process", order.first_load_of_a_process, emulated=False),
    Scenario("forked workers", lifetime.forked_workers),
    Scenario("a part that fails behind queued copies", lifetime.a_part_that_fails_behind_queued_copies),
    Scenario("a load without device memory", lifetime.a_load_without_device_memory),
    Scenario("a memory pool of the caller", lifetime.a_memory_pool_of_the_caller),
    Scenario("page-locked memory within the budget", lifetime.within_the_budget),
    Scenario("page-locked memory is given back", lifetime.given_back),
    Scenario("FSDP2: eval forward, save, load, forward", sharded.eval_forward_save_load_forward, emulated=False),
    *_captures(),  # a capture that breaks may disturb what comes after it
    Scenario("lazy snapshot of a graphed optimizer", graphs.lazy_snapshot_of_a_graphed_optimizer),
]
"""In the order of a run."""
