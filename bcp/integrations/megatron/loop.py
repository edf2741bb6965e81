"""The three functions that Megatron-LM's loop calls for its checkpoints, and the run behind them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import bcp
from bcp.integrations.common import check_settings
from bcp.integrations.megatron.arguments import check_arguments, kept, loads_own_run, warn_of_ignored
from bcp.integrations.megatron.states import States

__all__ = ["SAVED", "TRACKER", "Loop"]

log = logging.getLogger(__name__)
TRACKER = "latest_checkpointed_iteration.txt"  # where Megatron's tools look for the newest checkpoint
SAVED = ["iteration", "model", "optimizer", "opt_param_scheduler", "num_floating_point_operations_so_far"]


class Loop:
    """The run of one call of ``pretrain``. Its public methods stand in the place of Megatron's functions."""

    def __init__(self, module: Any, keep: Any, run_options: Mapping[str, Any]) -> None:
        """Remember the module of the loop, and the arguments of the run."""
        self._get_args, self._update_num_microbatches = module.get_args, module.update_num_microbatches
        self._keep, self._options = keep, dict[str, Any]({"framework": "megatron", **run_options})
        self._states = States(module.get_args)
        self._run: bcp.Run | None = None
        self._pending: Any = None
        self._random_states: Any = None  # of the last load
        self._last_step = self._last_samples = 0  # of the last save, or of the checkpoint that was resumed
        self._in_loop = self._is_over = False

    def load_checkpoint(self, model: Any, optimizer: Any, opt_param_scheduler: Any, **named: Any) -> tuple[int, Any]:
        """Load the checkpoint that the arguments name; return its iteration, and the operations until then."""
        load_arg = named.get("load_arg", "load")
        check_settings({f"load_checkpoint(load_arg={load_arg!r})": (load_arg != "load", "the loop has --load")})
        args = self._get_args()
        check_arguments(args)
        whole = not (args.finetune or args.no_load_optim or optimizer is None)
        own = whole and loads_own_run(args)
        step = (self._resume if own else self._copy)(args, model, optimizer if whole else None)
        if step and not whole and optimizer is not None and (args.fp16 or args.bf16):
            optimizer.reload_model_params()
        if not step or args.finetune:
            return 0, 0
        self._states.apply(opt_param_scheduler if whole else None)
        self._update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
        if own:
            self._last_step, self._last_samples = step, args.consumed_train_samples
        self._random_states = bcp.RngState().state_dict()
        return step, self._states.values.loaded["operations"]

    def save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Begin to save a step, once the tracker names the save before."""
        values = dict(zip(SAVED, given, strict=False)) | named
        step, model, optimizer, scheduler, operations = (values[name] for name in SAVED)
        run = self._started()
        if step == self._last_step:  # also 0, before the first step
            return
        if self._pending is not None:
            with suppress(bcp.BcpError):  # the run raises it, unless it tolerates it
                self._pending.wait()
        self._tell(run)
        states = self._states
        states.scheduler, states.operations = scheduler, operations
        states.live |= states.targets(model, [bcp.MegatronRng()], optimizer)
        self._pending = run.save(step)
        self._last_step, self._last_samples = step, self._get_args().consumed_train_samples

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:  # noqa: FBT001, FBT002
        """Write the tracker, after the save if ``blocking``. Before the first step, begin the run."""
        args = self._get_args()
        if args.save is None or self._is_over or (self._run is None and (blocking or terminate)):
            return
        run = self._started()
        if self._random_states is not None and not self._in_loop:
            bcp.RngState().load_state_dict(self._random_states)  # iterators over the data were made since
        self._in_loop = True
        self._is_over = terminate and self._last_samples == args.consumed_train_samples
        if self._is_over:  # else one more save follows
            run.close()
        elif blocking and self._pending is not None:
            self._pending.wait()
        self._tell(run)

    def _started(self) -> bcp.Run:
        """Return the run; one that was not resumed begins anew."""
        if self._run is None:
            args = self._get_args()
            check_arguments(args)
            self._make_run(args).resume(fresh=True)
        assert self._run is not None  # noqa: S101 -- for mypy
        return self._run

    def _make_run(self, args: Any) -> bcp.Run:
        warn_of_ignored(args)
        policies: dict[str, Any] = {
            "save": None,
            "keep": kept(args, self._keep),
            "preemption": bcp.Preemption(signals=()),
        }
        self._run = bcp.Run(args.save, self._states.live, **policies, **self._options)
        return self._run

    def _resume(self, args: Any, model: Any, optimizer: Any) -> int:
        """Resume the run in ``--save``; return its step, 0 if it begins."""
        run, states, asked = self._make_run(args), self._states, getattr(args, "ckpt_step", None)
        while True:
            step = run.choose({"megatron": states.values}, step=asked) or _nothing(args)
            states.live |= states.targets(model, states.random_targets(), optimizer)
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
        states, asked = self._states, getattr(args, "ckpt_step", None)
        options = self._options.get("load_options") or bcp.LoadOptions()
        newest = None if asked else bcp.latest(args.load, storage_options=options.storage_options)
        paths = [f"{args.load}/step-{asked:08d}" if asked else newest]
        torch.distributed.broadcast_object_list(paths)
        if paths[0] is None:
            return _nothing(args)
        extra = {"extra_states": {"megatron": states.values}}
        bcp.load(paths[0], extra, options=options, strict=not args.finetune)
        targets = states.targets(model, states.random_targets(), optimizer)
        del targets["extra_states"]
        bcp.load(paths[0], targets, framework="megatron", options=options)
        return int(paths[0].rpartition("step-")[2])

    def _tell(self, run: bcp.Run) -> None:
        """Write the newest durable step into the tracker."""
        if steps := run.committed():
            _write_tracker(self._get_args().save, steps[-1])


def _nothing(args: Any) -> int:
    """Begin at step 0, unless that is refused."""
    if getattr(args, "exit_on_missing_checkpoint", False):
        raise bcp.NotACheckpointError(f"--exit-on-missing-checkpoint: there is no checkpoint at {args.load}")
    if Path(args.load, TRACKER).exists():
        raise bcp.InputError(f"{args.load} has a {TRACKER}, but no checkpoint of bcp: take another --load")
    return 0


def _write_tracker(folder: str, step: int) -> None:
    """Replace the tracker, on rank 0. An object store gets none."""
    if torch.distributed.get_rank() == 0 and "://" not in folder:
        new = Path(folder, f"{TRACKER}.new")
        new.write_text(str(step))
        new.replace(Path(folder, TRACKER))
