"""Real Megatron jobs of four processes: saved, loaded into other layouts, saved again, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import megatron_jobs
import megatron_twin
import pytest
import torch
from logical import State, differences, logical
from megatron_gpt import Layout, Net
from ranks import Ranks

pytestmark = pytest.mark.dist

STEPS = 2
LLAMA, GPT = Net(), Net(llama=False)
TIED = replace(GPT, tied=True)
MOE = Net(experts=4)
TP2, TP4, PP2, DP4, TP2_PP2 = Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(), Layout(tp=2, pp=2)
VPP = Layout(pp=2, chunks=2)
EP2, EP4, EP2_TP2 = Layout(ep=2), Layout(ep=4), Layout(tp=2, ep=2)
EP2_ETP2, ETP2 = Layout(tp=2, ep=2, etp=2), Layout(tp=2, etp=2)


def loss(hops: Sequence[megatron_jobs.Hop], step: int) -> float:
    return fmean(each.losses[step] for each in hops if each.losses[step] is not None)


def run_chain(ranks: Ranks, path: Path, net: Net, layouts: Sequence[Layout], nets: Sequence[Net] = ()) -> State:
    """Train in the first layout, go through the others, and compare everything on the way; return what was saved."""
    hops = ranks.run(megatron_jobs.start, net, layouts[0], 5, STEPS, path / "0")
    first, expected = logical(path / "0"), loss(hops, STEPS)
    for number, (layout, into) in enumerate(zip(layouts[1:], nets or [net] * (len(layouts) - 1), strict=True), 1):
        found = ranks.run(megatron_jobs.reload, into, layout, path / f"{number - 1}", path / f"{number}", STEPS)
        assert not differences(first, logical(path / f"{number}")), f"after {layout}"
        assert loss(found, 0) == pytest.approx(expected, rel=1e-3 if net.bf16 else 2e-6), f"in {layout}"
        assert [each.collectives for each in (*hops, *found)] == [{}] * 8
    return first


def assert_as_twin(ranks: Ranks, net: Net, saved: State) -> None:
    """Compare with the unsharded twin: names, and values up to the order of summation."""
    _, values = ranks.run(megatron_twin.train, net, 5, STEPS)[0]
    assert saved.keys() == values.keys()
    for name, value in values.items():
        assert saved[name].dtype == value.dtype, name
        if net.bf16:  # gradients are rounded to 8 bits, and Adam makes small ones as large as the others
            error = (saved[name].double() - value.double()).norm() / value.double().norm()
            assert error < 0.15, name
        else:
            torch.testing.assert_close(
                saved[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_rounded_masters(saved: State) -> None:
    """The weights of a step are its masters, rounded."""
    weights = {fqn: tensor for (kind, fqn), tensor in saved.items() if kind == "model"}
    assert weights
    for fqn, weight in weights.items():
        assert torch.equal(weight, saved["optimizer", f"state.{fqn}.master_param"].bfloat16()), fqn


@pytest.mark.parametrize("net", [pytest.param(LLAMA, id="llama"), pytest.param(GPT, id="gpt", marks=pytest.mark.long)])
def test_dense_models_go_through_all_layouts_and_back(megatron4: Ranks, tmp_path: Path, net: Net) -> None:
    saved = run_chain(megatron4, tmp_path, net, [TP2, PP2, TP4, DP4, TP2_PP2, TP2])
    assert_as_twin(megatron4, net, saved)


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([EP2, EP4, EP2_TP2, EP2], id="some"),
        pytest.param([EP2, DP4, EP4, EP2_TP2, EP2_ETP2, PP2, ETP2, EP2], id="all", marks=pytest.mark.long),
    ],
)
def test_experts_go_through_layouts_and_back(megatron4: Ranks, tmp_path: Path, layouts: list[Layout]) -> None:
    saved = run_chain(megatron4, tmp_path, MOE, layouts)
    assert_as_twin(megatron4, MOE, saved)


def test_chunks_of_a_virtual_pipeline_load_into_any_stages(megatron4: Ranks, tmp_path: Path) -> None:
    run_chain(megatron4, tmp_path, LLAMA, [VPP, Layout(pp=4), TP2, VPP])


def test_tied_embeddings_are_stored_once_and_loaded_on_both_stages(megatron4: Ranks, tmp_path: Path) -> None:
    saved = run_chain(megatron4, tmp_path, TIED, [PP2, TP2, VPP, TP2_PP2, PP2])
    assert ("model", "output_layer.weight") not in saved
    assert_as_twin(megatron4, TIED, saved)


def test_bf16_masters_and_moments_of_the_distributed_optimizer(megatron4: Ranks, tmp_path: Path) -> None:
    net = replace(LLAMA, bf16=True)
    saved = run_chain(megatron4, tmp_path, net, [TP2, PP2, DP4, TP2_PP2, TP2])
    assert_rounded_masters(saved)
    assert_as_twin(megatron4, net, saved)


@pytest.mark.parametrize(
    "bf16", [pytest.param(False, id="fp32", marks=pytest.mark.long), pytest.param(True, id="bf16")]
)
def test_weights_that_are_gathered_late_are_those_of_the_last_step(
    megatron4: Ranks, tmp_path: Path, *, bf16: bool
) -> None:
    net = replace(LLAMA, overlap=True, bf16=bf16)
    saved = run_chain(megatron4, tmp_path, net, [TP2, DP4, TP2])
    assert_as_twin(megatron4, net, saved)
    if bf16:
        assert_rounded_masters(saved)


def test_several_instances_of_the_distributed_optimizer(megatron4: Ranks, tmp_path: Path) -> None:
    twice = replace(LLAMA, instances=2)
    assert_as_twin(megatron4, LLAMA, run_chain(megatron4, tmp_path, twice, [DP4, TP2, PP2], [twice, LLAMA]))


@pytest.mark.parametrize(
    "bf16", [pytest.param(False, id="fp32", marks=pytest.mark.long), pytest.param(True, id="bf16")]
)
def test_between_the_distributed_optimizer_and_the_others(megatron4: Ranks, tmp_path: Path, *, bf16: bool) -> None:
    flat = replace(LLAMA, bf16=bf16)
    whole = replace(flat, distopt=False)
    run_chain(megatron4, tmp_path, flat, [TP2, DP4, PP2, TP2], [whole, whole, flat])


def test_no_tensor_of_full_size_is_made(megatron4: Ranks, tmp_path: Path) -> None:
    big = replace(LLAMA, vocab=1 << 17, layers=2)  # 16 MiB each: embedding, output layer, and their states
    saves = megatron4.run(megatron_jobs.start_small, big, TP2, tmp_path / "0")
    assert max(each.largest for each in saves) < 2 * megatron_jobs.SMALL
    hops = megatron4.run(megatron_jobs.reload_small, big, PP2, tmp_path / "0", tmp_path / "1")
    assert max(each.largest for each in hops) < 12 << 20, "moments that were not there yet: this rank's half of each"
    assert not differences(logical(tmp_path / "0"), logical(tmp_path / "1"))
