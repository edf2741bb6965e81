"""The command ``bcp``: look into checkpoints, check, compare, copy and delete them, and examine a job.

One file a command. A command imports its needs when it runs, so ``bcp --help`` imports nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

import click

from bcp._version import __version__
from bcp.cli.screen import failed, said
from bcp.errors import BcpError
from bcp.runtime.imports import imported

__all__ = ["main"]

COMMANDS = {
    "ls": "List the checkpoints of a run.",
    "show": "Show the contents of a checkpoint.",
    "cat": "Print a tensor, a value or an object of a checkpoint.",
    "verify": "Compare all bytes of checkpoints with their checksums.",
    "diff": "Compare two checkpoints.",
    "import": "Make a checkpoint of files of Hugging Face, DCP, DeepSpeed, Megatron-core, torch.save and others.",
    "cp": "Copy a checkpoint, and check every byte on its way.",
    "edit": "Rename, drop, cast and add tensors of a checkpoint, in place.",
    "export": "Write a checkpoint for Hugging Face, safetensors, torch.load or DCP.",
    "publish": "Publish weights as a version that inference engines pull.",
    "pull": "Bring a local folder to the newest version of published weights.",
    "cool": "Move old checkpoints of a run to a cheaper place.",
    "promote": "Bring a checkpoint back from there.",
    "pin": "Keep a checkpoint of a run, whatever its policy says.",
    "rm": "Delete checkpoints.",
    "gc": "Delete the remains of saves that never committed.",
    "tiers": "Show the snapshots in the memory of this host.",
    "doctor": "Check what a job needs, from every rank.",
    "report": "Show which rank, stage and file made saves and loads slow, or fail.",
}
"""Names of the commands, and their first words."""

MODULES = {"import": "importing"}
"""Modules of commands whose names cannot be those of modules."""

DAMAGE, INTERRUPTED = 1, 130


class _Commands(click.Group):
    """The commands; the module of a command is imported when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- as click calls it
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 -- as above
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = imported(f"bcp.cli.{MODULES.get(cmd_name, cmd_name)}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- as above
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bcp")
def _commands() -> None:
    """Look into checkpoints, check, compare, copy and delete them, and examine a job.

    PATH is a directory or a URL: s3://, gs://, hdfs://, or any that fsspec knows. The exit status is 0 if all is well,
    1 for damage or a difference, and 2 for a wrong call.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # a pipe that was opened by its number cannot be asked for its place
            sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal's encoding lacks
    try:
        status = _commands.main(arguments, prog_name="bcp", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        said("interrupted")
        return INTERRUPTED
    except BcpError as error:
        return failed(error)
    except BrokenPipeError:  # the reader of a pipe, as head, has enough
        sys.stderr.close()
        return DAMAGE
    except OSError as error:  # as a full disk behind standard output
        said(str(error))
        return DAMAGE
    return int(status or 0)
