"""The callback of a Trainer that owns a run: what is saved, when training resumes and stops."""

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

import bcp
from bcp.integrations.common import HostState, step_of
from bcp.integrations.trl import Generation, pass_epochs

__all__ = ["BcpCallback", "DamagedError"]


class DamagedError(Exception):
    """The chosen checkpoint is damaged: the Trainer begins again with an older one."""


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
                now = {"train_batch_size": self.trainer.args.train_batch_size}  # else 4.57 takes that of other ranks
                state = json.loads(self._state.loaded["json"]) | now
                Path(folder, "trainer_state.json").write_text(json.dumps(state))
            yield None if is_new else folder

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Load the chosen checkpoint into the prepared objects."""
        self._states.update(self.states())
        try:
            self.run.resume(fresh=self._fresh)
        except bcp.CheckpointError as error:
            raise DamagedError from error
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
