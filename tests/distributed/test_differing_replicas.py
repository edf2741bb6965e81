from __future__ import annotations

from pathlib import Path

import differing
import pytest
import torch
from ranks import Ranks

import bcp

pytestmark = pytest.mark.dist


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint in this process."""
    model = differing.network()
    optimizer = torch.optim.AdamW(model.parameters())
    bcp.load(path, {"model": model, "optimizer": optimizer})
    return differing.values(model, optimizer)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name])]


@pytest.mark.parametrize("balance", ["split", "worst-fit"])
def test_buffers_that_ddp_broadcasts_are_those_of_rank_0_without_a_warning(
    ranks4: Ranks, tmp_path: Path, balance: str
) -> None:
    results = ranks4.run(differing.ddp, tmp_path, "broadcast", balance)
    assert not torch.equal(results[0][0]["1.running_mean"], results[1][0]["1.running_mean"])
    assert [texts for _, texts in results] == [[]] * 4
    for name in ("1", "2"):
        assert_equal(loaded(tmp_path / name), results[0][0])


@pytest.mark.parametrize("way", ["none", "module"])
def test_buffers_that_nobody_broadcasts_are_those_of_rank_0_with_one_warning(
    ranks4: Ranks, tmp_path: Path, way: str
) -> None:
    results = ranks4.run(differing.ddp, tmp_path, way, "split")
    (text,) = results[0][1]
    assert "model tensor '1.running_mean' (ranks 0, 1, 2, 3)" in text
    assert "'1.running_var'" in text
    assert "count=2" in text
    assert "replicas='error'" in text
    assert [texts for _, texts in results[1:]] == [[]] * 3
    for name in ("1", "2"):
        assert_equal(loaded(tmp_path / name), results[0][0])
    assert len(list((tmp_path / "2" / "optimizer").iterdir())) > 1, "other replicas are still divided"


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_models_that_train_apart_are_those_of_rank_0(ranks4: Ranks, tmp_path: Path, snapshot: str) -> None:
    results = ranks4.run(differing.local_steps, tmp_path, snapshot)
    (text,) = results[0][1]
    assert "count=20" in text
    assert_equal(loaded(tmp_path / "1"), results[0][0])
    for kind in ("model", "optimizer"):
        assert len(list((tmp_path / "1" / kind).iterdir())) == 1, "a sample may have missed a difference elsewhere"


def same(*values: float, shape: tuple[int, ...] = (300, 1000)) -> list[torch.Tensor]:
    return [torch.full(shape, value) for value in values]


STRIDED = torch.rand(64, 32, 9, 9)
EQUAL = {
    "nan": same(float("nan")),
    "strided": [STRIDED, STRIDED.contiguous(memory_format=torch.channels_last), STRIDED.clone()],
    "conjugate": [STRIDED.view(64, 32, 81)[..., :2].clone().view(-1, 2).view(torch.complex64).squeeze(-1)],
    "none": [torch.empty(0, 3)],
}
EQUAL["conjugate"].append(EQUAL["conjugate"][0].conj().resolve_conj().conj())


def test_equal_bits_are_equal(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(differing.plain, tmp_path, EQUAL, "error") == [[]] * 4


def one_element() -> list[torch.Tensor]:
    changed = torch.zeros(100, 90)
    changed[71, 3] = 1
    return [torch.zeros(100, 90), changed]


def sparse() -> list[torch.Tensor]:
    changed = STRIDED.contiguous(memory_format=torch.channels_last).clone(memory_format=torch.preserve_format)
    changed[:, :, 3] += 1
    return [STRIDED, STRIDED.clone(), changed]


DIFFERENT = {
    "zeros": same(0.0, -0.0),
    "scalar": [torch.tensor(1.0), torch.tensor(2.0)],
    "one element": one_element(),
    "strided": sparse(),
    "of rank 3": same(1.0, 1.0, 1.0, 2.0),
    "nan": [torch.tensor([float("nan")]), torch.tensor([float("nan")]).view(torch.int32).add(1).view(torch.float32)],
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_bits_are_refused_on_all_ranks_before_a_byte_is_written(
    ranks4: Ranks, tmp_path: Path, name: str
) -> None:
    pairs = {**EQUAL, name: DIFFERENT[name]}
    results = ranks4.run(differing.plain, tmp_path, pairs, "error", 2)
    assert all(len(texts) == 2 for texts in results)
    assert all("different values of 1 replicas" in text for texts in results for text in texts)
    assert all(f"model tensor {name!r} (ranks 0, 1, 2, 3)" in text for texts in results for text in texts)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", DIFFERENT)
def test_of_different_bits_those_of_the_lowest_rank_are_saved(ranks4: Ranks, tmp_path: Path, name: str) -> None:
    results = ranks4.run(differing.plain, tmp_path, {**EQUAL, name: DIFFERENT[name]}, "warn", 2)
    assert list(map(len, results)) == [1, 0, 0, 0]
    for number in ("0", "1"):
        target = {name: torch.full_like(DIFFERENT[name][0], 7.0)}
        bcp.load(tmp_path / number, {"model": target}, strict=False)
        assert torch.equal(target[name].view(torch.int32), DIFFERENT[name][0].view(torch.int32))


def test_nothing_is_compared_if_that_is_wished(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(differing.plain, tmp_path, {"w": DIFFERENT["zeros"]}, "ignore") == [[]] * 4


def test_replicas_may_begin_to_differ_at_any_save(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(differing.later, tmp_path)
    assert results == [[0, 0, 1, 1, 2], [0] * 5, [0] * 5, [0] * 5]
    for number, wanted in (("2", [1, 2, 1]), ("3", [1, 3, 1]), ("4", [1, 4, 4])):
        target = {f"w{number}": torch.zeros(300, 1000) for number in range(3)}
        bcp.load(tmp_path / number, {"model": target})
        assert [set(tensor.unique().tolist()) for tensor in target.values()] == [{float(value)} for value in wanted]


def test_values_that_are_no_tensors_are_compared_too(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(differing.rates, tmp_path, "warn")
    assert list(map(len, results)) == [1, 0, 0, 0]
    assert "optimizer value 'param_groups.0.bias.lr' (ranks 0, 1, 2, 3)" in results[0][0]
    assert "count=6" in results[0][0]
    model = differing.network()
    optimizer = torch.optim.AdamW(model.parameters())
    bcp.load(tmp_path / "2", {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_values_that_differ_are_refused_each_time(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(differing.rates, tmp_path, "error")
    assert all(len(texts) == 3 and all("param_groups.0.bias.lr" in text for text in texts) for texts in results)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_buffers_beside_sharded_parameters_are_those_of_rank_0(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(differing.sharded, tmp_path, (4,))
    (text,) = results[0][1]
    assert "count=3" in text
    model = differing.network()
    bcp.load(tmp_path, {"model": model})
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, results[0][0][name])
    assert torch.equal(model[0].weight, torch.cat([own["0.weight"] for own, _ in results]))


def test_replicas_of_shards_are_those_of_the_lowest_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    results = ranks4.run(differing.sharded, tmp_path, (2, 2))
    (text,) = results[0][1]
    assert "(ranks 0, 1, 2, 3)" in text
    model = differing.network()
    bcp.load(tmp_path, {"model": model})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.cat([own[name] for own, _ in results[:2]]))
