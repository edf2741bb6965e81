"""bcp in the training loop of Megatron-LM: ``megatron.training.training`` of its repository.

The loop has no extension point for checkpoints. :func:`install` replaces three of its functions by their names.

- ``loop``: the three functions, and the run behind them.
- ``arguments``: Megatron's arguments that are refused, ignored, and obeyed in another way.
- ``states``: the live objects of a job, and the loop's own values.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import bcp
from bcp.integrations.common import check_methods, check_settings
from bcp.integrations.megatron.loop import SAVED, Loop

__all__ = ["install", "uninstall"]

LOOP = "megatron.training.training"
REPLACED = {
    "save_checkpoint": SAVED,
    "load_checkpoint": ["ddp_model", "optimizer", "opt_param_scheduler", "load_arg", "strict"],
    "maybe_finalize_async_save": ["blocking", "terminate"],
}
CALLED: dict[str, list[str]] = {"get_args": [], "update_num_microbatches": ["consumed_samples"]}
_originals: dict[str, Any] = {}


def install(*, keep: Any = None, **run_options: Any) -> None:
    """Let ``pretrain`` of Megatron-LM save in the background, and resume on any parallel layout, with :class:`bcp.Run`.

    Call it before ``pretrain``. ``--save``, ``--load``, ``--save-interval``, ``--ckpt-step`` and ``--finetune`` keep
    their meaning. Each checkpoint is one commit of model, optimizer, scheduler, random states and consumed samples.
    ``latest_checkpointed_iteration.txt`` names a step after its commit only. Stops are Megatron's: with
    ``--exit-signal-handler`` it saves and exits, and bcp listens for no signal.

    A job with ``--load`` of the ``--save`` folder resumes from the newest intact checkpoint, or begins. Without
    ``--load`` it begins anew. With ``--load`` of another folder it reads there, and saves into ``--save``.

    Args:
        keep: as for :class:`bcp.Run`; the newest two stay in any case. None for all checkpoints, or for the multiples
            of ``--save-retain-interval``.
        run_options: more arguments of :class:`bcp.Run`, such as ``tolerate`` or ``save_options``.

    Raises:
        InputError: Megatron-LM is missing, its functions have other names or parameters, or an argument is Megatron's
            business. ``pretrain`` raises it before the first step for a setting that does not go with bcp.

    Example::

        bcp.integrations.megatron.install(keep=3)
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    """
    owners = {"save": "--save-interval", "preemption": "--exit-signal-handler", "standby_steps": "its loop"}
    refused = {f"install({name}=...)": (name in run_options, f"{owner} decides") for name, owner in owners.items()}
    check_settings({"a second install()": (_originals, "the loop has bcp's functions already"), **refused})
    try:
        module = importlib.import_module(LOOP)
    except ModuleNotFoundError as error:
        raise bcp.InputError(f"no {LOOP} ({error}): put the Megatron-LM repository on PYTHONPATH") from error
    check_methods(module, {**REPLACED, **CALLED}, "megatron", _version())
    loop = Loop(module, keep, run_options)
    for name in REPLACED:
        _originals[name] = getattr(module, name)
        setattr(module, name, getattr(loop, name))


def uninstall() -> None:
    """Give the loop its own functions back.

    Example::

        bcp.integrations.megatron.uninstall()

    """
    while _originals:
        setattr(importlib.import_module(LOOP), *_originals.popitem())


def _version() -> str:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "from source"
