"""The part in front of a Trainer: it trains within a run, and leaves saving and loading to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_callback import ExportableState

import bcp
from bcp.integrations.common import check_methods, check_settings
from bcp.integrations.transformers.callback import BcpCallback, DamagedError

__all__ = ["BcpTrainer", "attach"]

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
                    except DamagedError:
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
