"""Hooks and fields of torchtitan as the manager knows them, and values of fields that it refuses."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from torchtitan.components.checkpointer import TRAIN_STATE, BaseCheckpointManager

from bcp.integrations.common import check_settings

__all__ = ["REPLACED", "check_fields"]

REPLACED = {
    "_load": ("step",),
    "_save": ("curr_step", "last_step"),
    "_wait_for_saving": (),
    "_maybe_wait_for_staging": (),
    "_close": (),
}
FIELDS = """enable folder interval initial_load_path initial_load_model_only initial_load_in_hf last_save_model_only
    initial_load_in_hf_quantized last_save_in_hf export_dtype keep_latest_k load_step exclude_from_loading
    enable_first_step_checkpoint create_seed_checkpoint load_only"""  # of torchtitan 0.3


def check_fields(config: Any, trainer: Any, adapter: Any, states: AbstractSet[str]) -> None:
    """Refuse fields that cannot be obeyed.

    Args:
        config: of the manager.
        trainer: whose training a run ends after a signal.
        adapter: of the model to Hugging Face; None if it has none.
        states: names of all states of the job.

    Raises:
        InputError: a field cannot be obeyed; the message names it.

    """
    host = f"torchtitan {version('torchtitan')}"
    plain = BaseCheckpointManager.Config(initial_load_model_only=False)  # without a warning
    new = {field.name for field in fields(plain)} - {*FIELDS.split()}
    folder = adapter and (config.initial_load_path or adapter.hf_assets_path)
    excluded = {*config.exclude_from_loading}
    needed = {"model"} if config.initial_load_path else {"model", TRAIN_STATE}  # a run needs the trainer's step
    others = states - {"extra_states", *needed}
    refused: dict[str, tuple[object, str]] = {
        name: (getattr(config, name) != getattr(plain, name), f"new in {host}; update bcp") for name in new
    }
    refused |= {
        "enable": (not hasattr(trainer, "should_continue_training"), f"{host} has no trainer that can stop"),
        "initial_load_in_hf": (config.initial_load_in_hf and not folder, "it needs a path and an adapter to HF"),
        "initial_load_in_hf_quantized": (config.initial_load_in_hf_quantized, "convert the folder to bfloat16"),
        "last_save_in_hf": (config.last_save_in_hf and not adapter, "this model has no adapter to HF"),
        "load_step": (config.load_step < -1, "pass a step, or -1 for the newest checkpoint"),
        "create_seed_checkpoint": (config.create_seed_checkpoint and config.load_only, "load_only saves nothing"),
        "tolerate": (config.async_mode == "disabled" and config.tolerate > 0, "set async_mode='async'"),
        "exclude_from_loading": (not excluded <= others, f"pass some of {sorted(others)}"),
    }
    check_settings({f"checkpoint.{name}={getattr(config, name)!r}": why for name, why in refused.items()})
