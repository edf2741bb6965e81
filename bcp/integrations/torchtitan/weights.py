"""The model of a torchtitan job alone: seeds, weights from elsewhere, and exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.tools import filesystem

import bcp

__all__ = ["Weights"]


class Weights:
    """Loads and saves the model without a run, in torchtitan's names or in those of Hugging Face."""

    def __init__(self, config: Any, folder: str, models: Sequence[torch.nn.Module], adapter: Any) -> None:
        """Remember the model, and torchtitan's adapter to Hugging Face; None if this model has none."""
        self.seed = filesystem.join(folder, "seed")
        self._config, self._folder, self._models, self._adapter = config, folder, list(models), adapter

    @property
    def initial(self) -> str | None:
        """The path of weights for a new run: the config's, or the adapter's folder of Hugging Face."""
        in_hf = self._config.initial_load_in_hf and self._adapter
        return self._config.initial_load_path or (self._adapter.hf_assets_path if in_hf else None)

    def load(self, path: str, *, in_hf: bool = False) -> None:
        """Load the model. More names are no error: a folder of torchtitan's own manager has some."""
        model, options = ModelWrapper(self._models), self._config.load_options(cast=True, strict=False)
        tensors = self._adapter.to_hf(model.state_dict()) if in_hf else self._models
        if missing := bcp.load(path, {"model": tensors}, options=options).missing:
            raise bcp.InputError(f"{path} lacks {missing}; pass a checkpoint of this model")
        if in_hf:
            model.load_state_dict(self._adapter.from_hf(tensors))

    def export(self, step: int) -> None:
        """Save the model in the dtype of exports: as the seed at step 0, else as the model of the last step."""
        config = self._config
        path = filesystem.join(self._folder, f"model-{step:08d}") if step else self.seed
        dtype, in_hf = getattr(torch, config.export_dtype), step and config.last_save_in_hf
        state = ModelWrapper(self._models).state_dict()
        tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        model = self._adapter.to_hf(tensors) if in_hf else tensors
        bcp.save(path, {"model": model}, options=config.save_options(overwrite=True))
        if in_hf:
            bcp.tools.export_hf(path, f"{path}-hf", overwrite=True)
