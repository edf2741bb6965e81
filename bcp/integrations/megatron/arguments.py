"""Arguments of Megatron-LM: those that bcp refuses, ignores, and obeys in its own way."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

import bcp
from bcp.integrations.common import check_settings

__all__ = ["check_arguments", "kept", "loads_own_run", "warn_of_ignored"]

log = logging.getLogger(__name__)

REFUSED = {
    "its loop shards the model itself": "use_torch_fsdp2 use_megatron_fsdp use_custom_fsdp",
    "a restart needs all states": "no_save_optim no_save_rng",
    "a run has one kind of checkpoint": "non_persistent_save_interval non_persistent_ckpt_type",
    "it reads or ends checkpoints past bcp": "use_checkpoint_args inprocess_restart pretrained_checkpoint",
    "it converts a checkpoint": "ckpt_convert_format moe_use_upcycling",
    "the planner does not read such states": "use_precision_aware_optimizer optimizer_cpu_offload fp8_param_gather "
    "use_layer_wise_distributed_optimizer data_parallel_random_init",
    "its files would not commit with the weights": "dataloader_save perform_rl_step freeze_all_layers logits_save_dir",
    "all values are those of the checkpoint": "load_main_params_from_ckpt override_ckpt_iteration "
    "override_opt_param_scheduler",
}
IGNORED = (
    "async_save use_persistent_ckpt_worker ckpt_assume_constant_structure ckpt_fully_parallel_load verify_integrity "
    "dist_ckpt_optim_fully_reshardable auto_detect_ckpt_format use_dist_ckpt_deprecated dist_ckpt_format_deprecated"
)
STRICT = ("assume_ok_unexpected", "raise_unexpected", "raise_all")


def check_arguments(args: Any) -> None:
    """Refuse arguments that do not go with bcp.

    Raises:
        InputError: one is set; the message names it.

    """
    named = {name: why for why, names in REFUSED.items() for name in names.split()}
    form = getattr(args, "ckpt_format", "torch_dist")
    strictness = getattr(args, "dist_ckpt_strictness", "raise_all")
    check_settings(
        {_option(name): (getattr(args, name, None), why) for name, why in named.items()}
        | {f"--ckpt-format={form}": (form != "torch_dist", "bcp has one format: leave it out")}
        | {f"--dist-ckpt-strictness={strictness}": (strictness not in STRICT, "a load is strict")}
    )


def warn_of_ignored(args: Any) -> None:
    """Log the arguments that have no effect, on rank 0."""
    ignored = [_option(name) for name in IGNORED.split() if getattr(args, name, None)]
    if ignored and torch.distributed.get_rank() == 0:
        log.warning("bcp saves and loads in its own way: %s have no effect", ", ".join(ignored))


def kept(args: Any, keep: Any) -> Any:
    """Return the policy of retention: ``keep``, or that of the arguments, and the newest two."""
    if keep is None:
        multiples = getattr(args, "save_retain_interval", None)
        keep = bcp.policies.EveryKSteps(multiples) if multiples else bcp.policies.Everything()
    return bcp.policies.AnyKept(keep, 2)  # the tracker may be one behind


def loads_own_run(args: Any) -> bool:
    """Return whether the folder to load from is the one to save into."""
    return args.save is not None and _place(args.save) == _place(args.load)


def _place(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
