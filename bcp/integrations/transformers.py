"""bcp in the Trainer of Hugging Face transformers, and in each class that inherits it, as those of TRL."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_callback import ExportableState

import bcp
from bcp.integrations.common import HostState, check_methods, check_settings, step_of
from bcp.integrations.trl import Generation, pass_epochs

__all__ = ["BcpCallback", "BcpTrainer", "attach"]

REPLACED = {
    "train": ("resume_from_checkpoint", "trial"),
    "_save_checkpoint": ("model", "trial"),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_rng_state": ("checkpoint",),
    "_load_best_model": (),
}
WITH_DEEPSPEED = {"_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint")}  # from 5.10 on


def attach(
    trainer: transformers.Trainer, path: str | None = None, *, keep: Any = None, **run_options: Any
) -> transformers.Trainer:
    """Let a Trainer save in the background and resume on any parallelism, with :class:`bcp.Run`.

    The settings for saves, evaluations and the best model keep their meaning. A checkpoint holds model (of PEFT the
    trained part), optimizer, scheduler, scaler, random states and the Trainer's own state, in one commit. SIGTERM
    ends training at one step on all ranks, with a last save. ``resume_from_checkpoint=True`` resumes from the newest
    intact checkpoint, or begins. False and None begin anew, and leave what is there to the policy.

    Args:
        trainer: of any class that inherits ``transformers.Trainer``. Its class becomes one that inherits
            :class:`BcpTrainer`, too. ``trainer.bcp.run`` is then the run of the last call of ``train``.
        path: the run's folder, a directory or a URL; None for ``bcp`` in ``args.output_dir``.
        keep: as for :class:`bcp.Run`; None for ``args.save_total_limit`` checkpoints, or all. The best one stays, too,
            with ``args.load_best_model_at_end``.
        run_options: more arguments of :class:`bcp.Run`, such as ``tolerate`` or ``standby_steps``.

    Raises:
        InputError: a setting does not go with bcp, or this version of transformers lacks a method to replace.

    Example::

        trainer = SFTTrainer(model=model, args=args, train_dataset=data)
        bcp.integrations.transformers.attach(trainer)
        trainer.train(resume_from_checkpoint=True)

    """
    args, replaced = trainer.args, REPLACED | (WITH_DEEPSPEED if trainer.is_deepspeed_enabled else {})
    check_methods(transformers.Trainer, replaced, "transformers", transformers.__version__)
    refused = {
        "a second attach()": (isinstance(trainer, BcpTrainer), "the trainer has a run already"),
        "auto_find_batch_size": (args.auto_find_batch_size, "it restarts training inside of train()"),
        "enable_jit_checkpoint": (getattr(args, "enable_jit_checkpoint", False), "the run handles SIGTERM itself"),
        "save_only_model": (args.save_only_model, "a run resumes; export models with bcp.tools.export_hf"),
        "sync_ref_model": (
            getattr(args, "sync_ref_model", False),
            "no checkpoint has the reference model, which changes",
        ),
        "push_to_hub": (args.push_to_hub and args.hub_strategy != "end", "nothing is pushed before the end"),
        "attach(save=...)": ("save" in run_options, "save_strategy and save_steps of the arguments decide"),
    }
    check_settings(refused)
    trainer.__class__ = type(f"Bcp{type(trainer).__name__}", (BcpTrainer, type(trainer)), {})
    trainer.bcp = BcpCallback(trainer, path or str(Path(args.output_dir, "bcp")), keep, run_options)
    trainer.add_callback(trainer.bcp)
    return trainer


class BcpCallback(transformers.TrainerCallback):
    """The run of a Trainer, and the Trainer's events: resume when all objects are prepared, stop after a step."""

    run: bcp.Run

    def __init__(self, trainer: transformers.Trainer, path: str, keep: Any, run_options: Mapping[str, Any]) -> None:
        self.trainer, self.path, args = trainer, path.rstrip("/"), trainer.args
        keep = keep if keep is not None else args.save_total_limit or bcp.policies.Everything()
        if args.load_best_model_at_end:
            metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            keep = bcp.policies.AnyKept(
                keep, bcp.policies.Best(metric, mode="max" if args.greater_is_better else "min")
            )
        self._states, self.load_options = dict[str, Any](), run_options.get("load_options")
        self.make_run = partial(bcp.Run, self.path, self._states, save=None, **run_options, keep=keep)

    @contextmanager
    def chosen(self, asked: Any) -> Iterator[str | None]:
        """Choose a checkpoint; yield a folder with its state of the Trainer, or None to begin anew."""
        self._fresh, self._state = not asked, HostState(self._trainer_state)
        step = None if asked in (None, True, False) else step_of(str(asked), self.path, "resume_from_checkpoint")
        is_new = self._fresh or not self.run.choose({"trainer": self._state}, step=step)
        with tempfile.TemporaryDirectory() as folder:  # the host reads its step from a file, before it has the model
            if not is_new:
                Path(folder, "trainer_state.json").write_text(self._state.loaded["json"])
            yield None if is_new else folder

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Load the chosen checkpoint into the prepared objects."""
        self._states.update(self.states())
        try:
            self.run.resume(fresh=self._fresh)
        except bcp.CheckpointError as error:
            raise _DamagedError from error
        pass_epochs(train_dataloader, int(state.epoch or 0))
        now, before = self._trainer_state()["batch"], (self._state.loaded or {}).get("batch")
        if before not in (None, now) and not args.ignore_data_skip:
            words = "one step had %s samples and has %s: the Trainer skips steps, so the data differ"
            logging.getLogger("bcp").warning(words, before, now)
        self.name_best()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if the run does: the Trainer logs and saves the step, and ends. An evaluation may drop the save."""
        if self.run.stopping(state.global_step):
            control.should_save, control.should_training_stop, control.should_evaluate = True, True, False
        elif not control.should_save:
            self.run.maybe_save(state.global_step)  # holds a standby snapshot, if there are to be some

    def states(self) -> dict[str, Any]:
        """Return the live objects, as :func:`bcp.save` takes them."""
        trainer = self.trainer
        engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
        is_peft = any(kind.__module__.startswith("peft.") for kind in type(trainer.model).__mro__)  # FSDP2 inherits
        extra = {"trainer": self._state, "lr_scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
        extra["generation"] = Generation(trainer) if Generation.is_in(trainer) else None
        return {
            "model": engine or (bcp.trainable(trainer.model) if is_peft else trainer.model),
            "optimizer": engine or trainer.optimizer,
            "extra_states": {name: state for name, state in extra.items() if state is not None},
        }

    def _trainer_state(self) -> dict[str, Any]:
        args, state = self.trainer.args, dataclasses.replace(self.trainer.state, best_model_checkpoint=None)
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"json": json.dumps(dataclasses.asdict(state)), "batch": batch}

    def name_best(self) -> None:
        """Tell the Trainer that there is a best model. :meth:`bcp.Run.best` knows where, once saves are durable."""
        if step := self.trainer.state.best_global_step:
            self.trainer.state.best_model_checkpoint = f"{self.path}/step-{step:08d}"

    def metrics(self) -> dict[str, float]:
        """Return the numbers of this step that are equal on all ranks: the loss, and results of evaluations."""
        state, times = self.trainer.state, ("_runtime", "_per_second", "_time")
        logged = [entry.items() for entry in state.log_history if entry["step"] == state.global_step]
        values = {name: value for items in logged for name, value in items if isinstance(value, int | float)}
        results = {name for name in values if name.startswith("eval_") and not name.endswith(times)}
        return {name: value for name, value in values.items() if name in results or name == "loss"}


class _DamagedError(Exception):
    """The chosen checkpoint is damaged: the Trainer begins again with an older one."""


class BcpTrainer:
    """Methods in the place of a Trainer's own; :func:`attach` puts this class in front of the trainer's."""

    bcp: BcpCallback

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **named: Any) -> Any:
        """Train as the Trainer does, within a run; return once all saves are durable."""
        check_settings({"train(trial=...)": (trial is not None, "a search for hyper-parameters has no run")})
        self.bcp.run = self.bcp.make_run()
        with self.bcp.run:
            while True:
                with self.bcp.chosen(resume_from_checkpoint) as folder:
                    try:
                        return super().train(folder, None, *more, **named)  # type: ignore[misc]  # of the class behind
                    except _DamagedError:
                        continue

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        trainer = self.bcp.trainer
        trainer.store_flos()
        known = trainer.state.stateful_callbacks
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                known[name] = [*known[name], state] if isinstance(known.get(name), list) else state
        self.bcp.name_best()
        self.bcp.run.save(trainer.state.global_step, self.bcp.metrics())

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None: ...  # weights come with the optimizer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # batches were skipped, which draws random numbers
            self.bcp.run.reapply_random_states()

    def _load_best_model(self) -> None:
        if (path := self.bcp.run.best()) is not None:
            bcp.load(path, {"model": self.bcp.states()["model"]}, options=self.bcp.load_options)
        self.bcp.trainer.state.best_model_checkpoint = None  # else the host deletes folders of its own

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        given = None if self.bcp.trainer.is_deepspeed_enabled else resume_from_checkpoint  # its engine reads no files
        return super()._prepare_for_training(max_steps, train_dataloader, given)  # type: ignore[misc]  # as above
