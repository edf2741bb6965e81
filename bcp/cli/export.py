"""``bcp export hf|safetensors|torch|dcp A B``."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from bcp.cli.screen import as_json as with_json
from bcp.cli.screen import clean, drawn, join, print_json, storage, target
from bcp.runtime.imports import imported

__all__ = ["command"]

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
SIZE = re.compile(r"([0-9.]+) *([KMGT]I?B|)", re.IGNORECASE)


def _nbytes(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    """Return the bytes of a text such as 5GB or 300MiB."""
    match = SIZE.fullmatch(text.strip())
    with suppress(ValueError, KeyError, OverflowError):  # of 1.2.3, of a letter that only looks like K, of 400 digits
        if nbytes := int(float(match[1]) * UNITS[match[2].upper()]) if match else 0:
            return nbytes
    raise click.BadParameter(f"{text!r} is no number of bytes; pass one as 5GB or 300MiB")


def _common(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the arguments and options of all exports."""
    for decorate in (
        with_json,
        target,
        storage,
        click.option("--overwrite", is_flag=True, help="replace older files of the same kind"),
        click.option("--role", metavar="NAME", help="the role below the path A, as actor or critic"),
        click.option("--dtype", metavar="DTYPE", help="dtype of floating tensors in the target, as bfloat16"),
        click.option("--glob", metavar="GLOB", default="*", help="names of tensors, as 'layers.0.*'"),
        click.argument("goal", metavar="B"),
        click.argument("source", metavar="A"),
    ):
        function = decorate(function)
    return function


@click.group("export")
def command() -> None:
    """Write a checkpoint as files of other software: A is the checkpoint, B the target.

    Memory stays below 1 GiB, whatever the size. Every block of a checkpoint is compared with its checksum; files of
    other libraries have none. Under torchrun the ranks share the files of hf and dcp.
    """


@command.command("hf")
@_common
@click.option("--like", metavar="FOLDER", help="a folder with config.json and tokenizer, which are copied")
@click.option("--shard-size", "shard_bytes", metavar="SIZE", default="5GiB", show_default=True, callback=_nbytes)
def _hf(**given: Any) -> int:
    """Write a Hugging Face folder, for from_pretrained, vLLM and SGLang."""
    return _run("export_hf", given, like=given.pop("like"), shard_bytes=given.pop("shard_bytes"))


@command.command("safetensors")
@_common
@click.option("--kind", metavar="KIND", default="model", show_default=True, help="model or optimizer")
def _safetensors(**given: Any) -> int:
    """Write one safetensors file."""
    return _run("export_safetensors", given, kind=given.pop("kind"))


@command.command("torch")
@_common
@click.option("--kind", metavar="KIND", help="the state dict of this kind alone: model or optimizer")
def _torch(**given: Any) -> int:
    """Write one file for torch.load(weights_only=True)."""
    return _run("export_torch", given, kind=given.pop("kind"))


@command.command("dcp")
@_common
@click.option("--kind", metavar="KIND", help="this kind alone: model or optimizer")
def _dcp(**given: Any) -> int:
    """Write a folder for torch.distributed.checkpoint.load."""
    return _run("export_dcp", given, kind=given.pop("kind"))


def _run(name: str, given: dict[str, Any], **own: Any) -> int:
    """Call an export, and print its result."""
    export, keys = getattr(imported("bcp.tools"), name), ("glob", "dtype", "role", "overwrite")
    keywords = own | {key: given[key] for key in keys}
    keywords |= {key: given[key] or None for key in ("storage_options", "target_options")}
    rank = join()
    with drawn("export", rank) as progress:
        result = export(given["source"], given["goal"], progress=progress, **keywords)
    if rank == 0:
        print_json(asdict(result)) if given["as_json"] else click.echo(clean(str(result)))
    return 0
