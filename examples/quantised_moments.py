"""Keep AdamW's moments in 8 bits, as Check-N-Run does (paper sec. 7): 6 bytes a parameter instead of 12.

This loses information, so it is a matter of the trainer and not of a codec. The trainer makes the states smaller before
the save, and larger behind the load. Weights stay as they are. Each row of a matrix has a scale, and the tensors are
cut as the parameters are. So such a checkpoint loads onto any number of ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import bcp

STEPS, MORE = 30, 30

Packed = dict[str, dict[str, dict[str, Tensor]]]
"""By parameter and moment: ``values``, int8, and ``scale``, float32."""


def packed(moments: Mapping[str, Mapping[str, Tensor]]) -> Packed:
    """Return moments in 8 bits. The second one is kept as its root, rounded up: a zero would make a step explode."""
    return {
        name: {"exp_avg": small(each["exp_avg"]), "exp_avg_sq": small(each["exp_avg_sq"].sqrt(), up=True)}
        for name, each in moments.items()
    }


def small(tensor: Tensor, *, up: bool = False) -> dict[str, Tensor]:
    """Return a tensor in 8 bits, with the largest number of each row as 127."""
    rows = tensor.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(rows > 0, rows / 127, torch.ones_like(rows))
    steps = tensor / scale
    return {"values": (steps.ceil() if up else steps.round()).clamp(-127, 127).to(torch.int8), "scale": scale}


def unpack(kept: Packed, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Fill moments from 8 bits."""
    for name, each in moments.items():
        mean, root = (kept[name][key]["values"] * kept[name][key]["scale"] for key in ("exp_avg", "exp_avg_sq"))
        each["exp_avg"].copy_(mean)
        each["exp_avg_sq"].copy_(root.square())


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return the states of each parameter by its name."""
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def make() -> tuple[nn.Module, torch.optim.AdamW]:
    """Make a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> float:
    """Train; return the last loss."""
    loss = torch.zeros(())
    for step in steps:
        batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(root: Path) -> None:
    """Save in both ways, come back from 8 bits, and compare size and loss with those of the undisturbed training."""
    model, optimizer = make()
    train(model, optimizer, range(STEPS))
    full = bcp.save(root / "full", {"model": model, "optimizer": optimizer})
    extra = {"param_groups": optimizer.state_dict()["param_groups"], "step": STEPS}
    kept = packed(moments_of(model, optimizer))
    small = bcp.save(root / "small", {"model": {"net": model.state_dict(), "moments": kept}, "extra_states": extra})
    print(f"{full.nbytes:,} bytes, and {small.nbytes:,} with moments of 8 bits")
    expected = train(model, optimizer, range(STEPS, STEPS + MORE))

    model, optimizer = make()
    train(model, optimizer, range(1))  # makes the states, whose values the load replaces
    kept = packed(moments_of(model, optimizer))
    bcp.load(root / "small", {"model": {"net": model.state_dict(), "moments": kept}, "extra_states": extra})
    unpack(kept, moments_of(model, optimizer))
    for state in optimizer.state.values():
        state["step"].fill_(extra["step"])
    loss = train(model, optimizer, range(STEPS, STEPS + MORE))
    print(f"loss after {MORE} steps more: {loss:.5f}, undisturbed {expected:.5f}")
    assert small.nbytes < 0.6 * full.nbytes
    assert abs(loss - expected) < 0.05 * expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
