"""CUDA graphs: a capture during a save, and an optimizer whose step is replayed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from gpu.scenarios.scale import Scale, alike, assert_alike, forget_pinned, loaded, paused
from torch import nn

import bcp


class Weights(nn.Module):
    """One parameter."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((numel,), 5.0).to("cuda"))


def capture_during_a_save(path: Path, scale: Scale, *, mode: str, snapshot: Any) -> None:
    """The save copies, pins memory and waits for events while the training thread captures."""
    model, own = Weights(scale.numel), torch.zeros(10, device="cuda")
    states = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    graph = torch.cuda.CUDAGraph()
    own.add_(0)  # loads the kernel
    torch.cuda.synchronize()
    forget_pinned()
    go_on, begun = threading.Event(), threading.Event()
    options = bcp.SaveOptions(snapshot=snapshot, edit=paused(go_on, begun))
    result: list[Any] = []

    def save() -> None:
        try:
            result.append(bcp.save(path, states, async_checkpoint=True, options=options).wait())
        except Exception as error:  # noqa: BLE001 -- raised below
            result.append(error)

    saving = threading.Thread(target=save)
    saving.start()
    assert begun.wait(30)
    with torch.cuda.graph(graph, capture_error_mode=mode):
        own.add_(1)
        go_on.set()
        saving.join()
    assert isinstance(result[0], bcp.SaveResult), result[0]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert alike(own, torch.full((10,), 2.0))
    wanted = {"w": torch.full((scale.numel,), 5.0)}
    assert_alike(loaded(path, wanted), wanted)


def lazy_snapshot_of_a_graphed_optimizer(path: Path, scale: Scale) -> None:
    """A replayed step calls no hook: the save is refused, or has the values from before the replay."""
    model = Weights(scale.numel)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.w.grad = torch.full((scale.numel,), -1.0).to("cuda")
    states = {"model": model, "optimizer": optimizer}
    optimizer.step()  # loads the kernel
    torch.cuda.synchronize()
    bcp.save(path / "first", states, async_checkpoint=True, snapshot="lazy").wait()  # its hooks are there from now on
    graph, go_on = torch.cuda.CUDAGraph(), threading.Event()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        optimizer.step()
    torch.cuda.synchronize()
    options = bcp.SaveOptions(snapshot="lazy", edit=paused(go_on))
    try:
        pending = bcp.save(path / "second", states, async_checkpoint=True, options=options)
        graph.replay()
        torch.cuda.synchronize()
        go_on.set()
        pending.wait()
    except bcp.BcpError:
        return
    finally:
        go_on.set()
    wanted = {"w": torch.full((scale.numel,), 6.0)}
    assert_alike(loaded(path / "second", wanted), wanted)
