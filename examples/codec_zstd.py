"""Compress what is stored: a codec is a name and two functions, bytes to bytes.

The name is recorded in the checkpoint, so a load without the codec says which one is missing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import zstandard
from torch import nn

import bcp

ZSTD = bcp.extend.Codec("zstd", encode=lambda data: zstandard.compress(data, 3), decode=zstandard.decompress)


def main(root: Path) -> None:
    """Save weights that compress well, load them, and see what a reader without the codec is told."""
    torch.manual_seed(0)
    # fp32 master weights of a model that was kept in bf16: the lower half of every number is zero.
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).bfloat16().float()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    result = bcp.save(root / "zstd", {"model": model}, options=bcp.SaveOptions(codecs=[ZSTD]))
    print(f"{result.state_nbytes:,} bytes of state, {result.nbytes:,} bytes stored: ", end="")
    print(f"ratio {result.state_nbytes / result.nbytes:.2f}")
    assert result.nbytes < 0.8 * result.state_nbytes

    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    bcp.load(root / "zstd", {"model": model}, options=bcp.LoadOptions(codecs=[ZSTD]))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    print("loaded, bit by bit the same")

    try:
        bcp.load(root / "zstd", {"model": model})
    except bcp.MissingCodecError as error:
        print(f"without the codec: {error}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
