"""Train a small model with a trainer of others for 8 steps; the job that ``benchmarks.chaos_hosts`` kills and resumes.

The last weights depend on model, optimizer, scheduler, random states and the position in the data of every step before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bcp
from benchmarks.chaos_job import (
    GRACE,
    KEPT,
    RUN_STEPS,
    SAVE_EVERY,
    STOPPED,
    committed,
    repeat_names,
    tear_files_of_aiofiles,
)


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """32 rows of tokens, the same in each life."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": tokens, "labels": tokens}


def digest(model: nn.Module) -> str:
    """Return a digest of all weights."""
    summary = hashlib.sha256()
    for weight in model.state_dict().values():
        summary.update(weight.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def check_newest(out: Path, step: int) -> None:
    """Refuse a job that was not resumed from the newest committed checkpoint; print the step for ckpt-chaos.

    Raises:
        SystemExit: an older one was taken.

    """
    found = committed(out)
    newest = found[-1].name if found else "step-00000000"
    if newest != f"step-{step:08d}":
        raise SystemExit(f"{newest} is committed, but the run was resumed from step {step}")
    print(f"resumed from step {step}", flush=True)


def transformers(out: Path) -> tuple[nn.Module, bool]:
    """Train with the Trainer of Hugging Face; return the model, and whether SIGTERM has ended it."""
    from transformers import (  # noqa: PLC0415 -- of another environment
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from bcp.integrations.transformers import attach  # noqa: PLC0415 -- as above

    class Check(TrainerCallback):  # type: ignore[misc]  # of no known type
        """Looks at the folder between the resumption and the first save."""

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            if not trainer.bcp.checked:
                trainer.bcp.checked = True
                check_newest(out, trainer.bcp.run.resumed.step)

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
        output_dir=str(out.parent / "unused"),
        per_device_train_batch_size=2,
        max_steps=RUN_STEPS,
        save_steps=SAVE_EVERY,
        save_total_limit=KEPT,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=args, train_dataset=Tokens())
    attach(trainer, str(out), preemption=bcp.Preemption(grace_seconds=GRACE))
    trainer.bcp.checked = False
    trainer.add_callback(Check())
    if (out / f"step-{RUN_STEPS:08d}" / "metadata.arrow").exists():  # the Trainer would train one step more
        bcp.load(out / f"step-{RUN_STEPS:08d}", {"model": model})
        check_newest(out, RUN_STEPS)
        return model, False
    trainer.train(resume_from_checkpoint=True)
    return model, trainer.state.global_step < RUN_STEPS


HOSTS: dict[str, Callable[[Path], tuple[nn.Module, bool]]] = {"transformers": transformers}


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--host", choices=HOSTS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    if "CKPT_CHAOS_WATCH" in os.environ:
        repeat_names(0)
        tear_files_of_aiofiles()
    model, stopped = HOSTS[options.host](options.out)
    if stopped:
        sys.exit(STOPPED)
    (options.out / "digest").write_text(digest(model))


if __name__ == "__main__":
    main()
