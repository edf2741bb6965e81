"""The job of the Trainer of Hugging Face: a small Llama with dropout in its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import bcp
from bcp.integrations.transformers import attach
from benchmarks.chaos_hosts.job import Life
from benchmarks.chaos_job import GRACE, KEPT, RUN_STEPS, SAVE_EVERY


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """32 rows of tokens, the same in each life."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "labels": tokens}


class Began(TrainerCallback):
    """Takes note of the step that the Trainer has taken from a checkpoint."""

    resumed = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.resumed = state.global_step


def train(out: Path, *, native: bool) -> Life:
    """Train to the end, from the newest checkpoint if there is one."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    args = TrainingArguments(
        output_dir=str(out if native else out.parent / "unused"),
        per_device_train_batch_size=2,
        max_steps=RUN_STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=KEPT,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    model, began = LlamaForCausalLM(config), Began()
    last = get_last_checkpoint(str(out)) if native else bcp.latest(str(out))
    if last and int(last.rpartition("-")[2]) == RUN_STEPS:  # the Trainer would train one step more
        if native:
            return Life(LlamaForCausalLM.from_pretrained(last), RUN_STEPS, RUN_STEPS)
        bcp.load(last, {"model": model})
        return Life(model, RUN_STEPS, RUN_STEPS)
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(), callbacks=[began])
    if native:
        trainer.train(resume_from_checkpoint=last)
        return Life(model, began.resumed, trainer.state.global_step)
    attach(trainer, str(out), preemption=bcp.Preemption(grace_seconds=GRACE))
    trainer.train(resume_from_checkpoint=True)
    return Life(model, trainer.bcp.run.resumed.step, trainer.state.global_step)
