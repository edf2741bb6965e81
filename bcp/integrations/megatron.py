"""bcp in the training loop of Megatron-LM: ``megatron.training.training`` of its repository."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import bcp
from bcp.integrations.common import HostState, check_methods, check_settings

__all__ = ["install", "uninstall"]

log = logging.getLogger(__name__)
LOOP = "megatron.training.training"
TRACKER = "latest_checkpointed_iteration.txt"
SAVED = ["iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far"]
REPLACED = {
    "save_checkpoint": SAVED,
    "load_checkpoint": ["ddp_model", "optimizer", "opt_param_scheduler", "load_arg", "strict"],
    "maybe_finalize_async_save": ["blocking", "terminate"],
}
CALLED: dict[str, list[str]] = {"get_args": [], "update_num_microbatches": ["consumed_samples"]}
SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
ALIKE = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")
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
        loop = importlib.import_module(LOOP)
    except ModuleNotFoundError as error:
        raise bcp.InputError(f"no {LOOP} ({error}): put the Megatron-LM repository on PYTHONPATH") from error
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        version = "from source"
    check_methods(loop, {**REPLACED, **CALLED}, "megatron", version)
    job = _Job(loop, keep, run_options)
    for name in REPLACED:
        _originals[name] = getattr(loop, name)
        setattr(loop, name, getattr(job, name))


def uninstall() -> None:
    """Give the loop its own functions back."""
    while _originals:
        setattr(importlib.import_module(LOOP), *_originals.popitem())


class _Job:
    """The run of one call of ``pretrain``, and the functions in the place of Megatron's own."""

    _run: bcp.Run | None = None
    _pending: Any = None
    _scheduler: Any = None
    _operations: Any = 0
    _random_states: Any = None
    _saved = (0, 0)  # the last saved or resumed step, and its samples
    _in_loop = _is_over = False

    def __init__(self, loop: Any, keep: Any, run_options: Mapping[str, Any]) -> None:
        self._args, self._update_num_microbatches = loop.get_args, loop.update_num_microbatches
        self._keep, self._options = keep, dict[str, Any]({"framework": "megatron", **run_options})
        self._host, self._states = HostState(self._values), dict[str, Any]()

    def load_checkpoint(self, model: Any, optimizer: Any, opt_param_scheduler: Any, **named: Any) -> tuple[int, Any]:
        """Load the checkpoint that the arguments name; return its iteration, and the operations until then."""
        args = self._checked(named.get("load_arg", "load"))
        whole = not (args.finetune or args.no_load_optim or optimizer is None)
        own = whole and args.save is not None and _place(args.save) == _place(args.load)
        step = (self._resume if own else self._copy)(args, model, optimizer if whole else None)
        if step and not whole and optimizer is not None and (args.fp16 or args.bf16):
            optimizer.reload_model_params()
        if not step or args.finetune:
            return 0, 0
        values = self._host.loaded
        vars(args).update({name: values[name] for name in SAMPLES})
        self._update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        if whole and opt_param_scheduler is not None:
            opt_param_scheduler.load_state_dict(values["scheduler"])
        self._saved = (step, args.consumed_train_samples) if own else (0, 0)
        self._random_states = bcp.RngState().state_dict()
        return step, values["operations"]

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Begin to save a step, once the tracker names the save before."""
        values = dict(zip(SAVED, given, strict=False)) | named
        step, model, optimizer, self._scheduler, self._operations = (values[name] for name in SAVED)
        run = self._started()
        if step == self._saved[0]:  # also 0, before the first step
            return
        if self._pending is not None:
            with suppress(bcp.BcpError):  # the run raises it, unless it tolerates it
                self._pending.wait()
        self._tell(run)
        self._states |= self._targets(model, [bcp.MegatronRng()], optimizer)
        self._pending, self._saved = run.save(step), (step, self._args().consumed_train_samples)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:  # noqa: FBT001, FBT002
        """Write the tracker, after the save if ``blocking``. Before the first step, begin the run."""
        args = self._args()
        if args.save is None or self._is_over or (self._run is None and (blocking or terminate)):
            return
        run = self._started()
        if self._random_states is not None and not self._in_loop:
            bcp.RngState().load_state_dict(self._random_states)  # iterators over the data were made since
        self._in_loop, self._is_over = True, terminate and self._saved[1] == args.consumed_train_samples
        if self._is_over:  # else one more save follows
            run.close()
        elif blocking and self._pending is not None:
            self._pending.wait()
        self._tell(run)

    def _checked(self, load_arg: str = "load") -> Any:
        """Return the arguments of Megatron, without those that do not go with bcp."""
        args = self._args()
        form = getattr(args, "ckpt_format", "torch_dist")
        strictness = getattr(args, "dist_ckpt_strictness", "raise_all")
        is_loose = strictness not in ("assume_ok_unexpected", "raise_unexpected", "raise_all")
        named = {name: why for why, names in REFUSED.items() for name in names.split()}
        check_settings(
            {_option(name): (getattr(args, name, None), why) for name, why in named.items()}
            | {f"load_checkpoint(load_arg={load_arg!r})": (load_arg != "load", "the loop has --load")}
            | {f"--ckpt-format={form}": (form != "torch_dist", "bcp has one format: leave it out")}
            | {f"--dist-ckpt-strictness={strictness}": (is_loose, "a load is strict")}
        )
        return args

    def _made(self, args: Any) -> bcp.Run:
        ignored = [_option(name) for name in IGNORED.split() if getattr(args, name, None)]
        if ignored and torch.distributed.get_rank() == 0:
            log.warning("bcp saves and loads in its own way: %s have no effect", ", ".join(ignored))
        multiples = getattr(args, "save_retain_interval", None)
        usual = bcp.policies.EveryKSteps(multiples) if multiples else bcp.policies.Everything()
        keep = bcp.policies.AnyKept(usual if self._keep is None else self._keep, 2)  # the tracker may be one behind
        preemption = bcp.Preemption(signals=())
        self._run = bcp.Run(args.save, self._states, save=None, preemption=preemption, keep=keep, **self._options)
        return self._run

    def _started(self) -> bcp.Run:
        """Return the run; one that was not resumed begins anew."""
        if self._run is None:
            self._made(self._checked()).resume(fresh=True)
        assert self._run is not None  # noqa: S101 -- for mypy
        return self._run

    def _resume(self, args: Any, model: Any, optimizer: Any) -> int:
        """Resume the run in ``--save``; return its step, 0 if it begins."""
        run, asked = self._made(args), getattr(args, "ckpt_step", None)
        while True:
            step = run.choose({"megatron": self._host}, step=asked) or _nothing(args)
            self._states |= self._targets(model, self._random(args), optimizer)
            try:
                run.resume()
            except bcp.CheckpointError as error:
                if asked or not step:
                    raise
                log.warning("%s; an older checkpoint is tried", error)
                continue
            if step:
                _write_tracker(args.save, step)
            return step

    def _copy(self, args: Any, model: Any, optimizer: Any) -> int:
        """Load a checkpoint of another run, or a part of one; return its step, 0 if there is none."""
        asked = getattr(args, "ckpt_step", None)
        options = self._options.get("load_options") or bcp.LoadOptions()
        newest = partial(bcp.latest, args.load, storage_options=options.storage_options)
        paths = [f"{args.load}/step-{asked:08d}" if asked else newest()]
        torch.distributed.broadcast_object_list(paths)
        if paths[0] is None:
            return _nothing(args)
        bcp.load(paths[0], {"extra_states": {"megatron": self._host}}, options=options, strict=not args.finetune)
        states = self._targets(model, self._random(args), optimizer)
        del states["extra_states"]
        bcp.load(paths[0], states, framework="megatron", options=options)
        return int(paths[0].rpartition("step-")[2])

    def _targets(self, model: Any, random: Any, optimizer: Any) -> dict[str, Any]:
        """Return live objects, as :func:`bcp.save` takes them."""
        states = {"model": [*model, *random], "extra_states": {"megatron": self._host, "random": _NoRandomStates()}}
        return states if optimizer is None else {**states, "optimizer": optimizer}

    def _random(self, args: Any) -> list[Any]:
        """Return the target of the saved random states: Megatron's, or on another layout a place to drop them."""
        saved, live = self._host.loaded, bcp.MegatronRng()
        if saved is None:
            return []
        if saved["alike"] != (alike := self._values()["alike"]) and not args.finetune:
            raise bcp.InputError(f"the checkpoint is of a model with {saved['alike']}, and this job has {alike}")
        (own,), shape = live.sharded_state_dict().values(), tuple(saved["random"])
        if shape == own.global_shape and not (args.finetune or args.no_load_rng):
            return [live]
        places = itertools.product(*map(range, shape)) if torch.distributed.get_rank() == 0 else ()
        return [replace(own, data=0, global_shape=shape, global_offset=place, replica_id=0) for place in places]

    def _values(self) -> dict[str, Any]:
        """Return what the loop needs beside tensors."""
        args = self._args()
        (own,) = bcp.MegatronRng().sharded_state_dict().values()
        return {
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "operations": self._operations,
            "random": list(own.global_shape),
            "alike": {name: getattr(args, name, None) for name in ALIKE},
            **{name: getattr(args, name, 0) for name in SAMPLES},
        }

    def _tell(self, run: bcp.Run) -> None:
        """Write the newest durable step into the tracker."""
        if steps := run.committed():
            _write_tracker(self._args().save, steps[-1])


class _NoRandomStates(bcp.RngState):
    """Stands for the random states that a run adds, which are those of ranks and not of a layout."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def load_derived(self, state: Mapping[str, Any], rank: int) -> None:
        pass


def _nothing(args: Any) -> int:
    """Begin at step 0, unless that is refused."""
    if getattr(args, "exit_on_missing_checkpoint", False):
        raise bcp.NotACheckpointError(f"--exit-on-missing-checkpoint: there is no checkpoint at {args.load}")
    if Path(args.load, TRACKER).exists():
        raise bcp.InputError(f"{args.load} has a {TRACKER}, but no checkpoint of bcp: take another --load")
    return 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _place(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _write_tracker(folder: str, step: int) -> None:
    """Replace the tracker of Megatron, on rank 0; not in an object store."""
    if torch.distributed.get_rank() == 0 and "://" not in folder:
        new = Path(folder, f"{TRACKER}.new")
        new.write_text(str(step))
        new.replace(Path(folder, TRACKER))
