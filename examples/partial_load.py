"""Load less than was saved: a model for evaluation out of a training checkpoint, a backbone under a new head."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import bcp


class Classifier(nn.Module):
    """A backbone and a head."""

    def __init__(self, classes: int, *, head: str = "head") -> None:
        """Make it; ``head`` is the name of the last layer."""
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head_name = head
        self.add_module(head, nn.Linear(64, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 32) to (batch, classes)."""
        return self.get_submodule(self.head_name)(self.second(self.first(x).relu()))  # type: ignore[no-any-return]  # nn.Module's call is untyped


def trained(root: Path) -> Classifier:
    """Train a little and save everything that a training has."""
    model = Classifier(10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    bcp.save(root / "train", {"model": model, "optimizer": optimizer, "extra_states": {"step": 1}})
    return model


def main(root: Path) -> None:
    """Load the model without its optimizer, then the backbone alone."""
    torch.manual_seed(0)
    model = trained(root)

    evaluated = Classifier(10)
    result = bcp.load(root / "train", {"model": evaluated})  # kinds that are not asked for are not read
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), evaluated.parameters(), strict=True))
    print(f"evaluation: {result.nbytes:,} bytes, no optimizer states")

    fine_tuned = Classifier(3, head="new_head")
    result = bcp.load(root / "train", {"model": fine_tuned}, strict=False)  # what both have, by name
    assert torch.equal(model.first.weight, fine_tuned.first.weight)
    print(f"fine-tuning: not in the checkpoint {sorted(result.missing)}, not in the model {sorted(result.unexpected)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
