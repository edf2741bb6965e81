"""What a load into real Megatron jobs does besides the layouts: padding, objects, hyper-parameters, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import megatron_details as details
import pytest
import torch
from logical import differences, hyper, logical
from megatron_gpt import Layout, Net, initial
from ranks import Ranks
from samples import sample

import bcp

pytestmark = pytest.mark.dist

NET = Net(layers=2)
BF16 = replace(NET, bf16=True)
EXPERTS = replace(NET, experts=4)
TP2, PP2, DP4, TP2_PP2 = Layout(tp=2), Layout(pp=2), Layout(), Layout(tp=2, pp=2)
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def saved(megatron4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a job in fp32 after one step."""
    path = tmp_path_factory.mktemp("megatron") / "fp32"
    megatron4.run(details.save, NET, TP2, path)
    return path


@pytest.fixture(scope="module")
def saved_bf16(megatron4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a job in bf16 after one step."""
    path = tmp_path_factory.mktemp("megatron") / "bf16"
    megatron4.run(details.save, BF16, TP2, path)
    return path


def of_kind(path: Path, kind: str) -> dict[str, torch.Tensor]:
    return {fqn: tensor for (of, fqn), tensor in logical(path).items() if of == kind}


@pytest.mark.parametrize("layout", [Layout(tp=4), PP2], ids=str)
def test_a_longer_vocabulary_gets_the_saved_rows_and_keeps_its_own(
    megatron4: Ranks, saved: Path, tmp_path: Path, layout: Layout
) -> None:
    longer = replace(NET, vocab=128)
    megatron4.run(details.resave, longer, layout, saved, tmp_path / "1")
    first, then = logical(saved), logical(tmp_path / "1")
    for name in [name for name in first if EMBEDDING in name[1] or "output_layer.weight" in name[1]]:
        if not first[name].dim():
            continue
        assert then[name].shape == (128, 32)
        assert torch.equal(then[name][:96], first[name])
        if name[0] == "optimizer":
            assert not then[name][96:].any()
    assert torch.equal(then["model", EMBEDDING][96:], initial(EMBEDDING, [128, 32], 77)[96:])


def test_a_shorter_vocabulary_gets_its_rows(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(details.save, replace(NET, vocab=128), PP2, tmp_path / "0")
    megatron4.run(details.resave, NET, TP2, tmp_path / "0", tmp_path / "1")
    first, then = logical(tmp_path / "0"), logical(tmp_path / "1")
    assert first.keys() == then.keys()
    for name, tensor in then.items():
        assert torch.equal(tensor, first[name][:96] if tensor.shape[:1] == (96,) else first[name]), name


def test_random_states_come_back_on_all_data_parallel_ranks(megatron4: Ranks, tmp_path: Path) -> None:
    drawn = megatron4.run(details.rng, TP2, tmp_path / "0", "save")
    again = megatron4.run(details.rng, TP2, tmp_path / "0", "load")
    assert again == [drawn[0], drawn[1], drawn[0], drawn[1]], "of the first rank that has the same tensor parallel rank"
    assert drawn[0] != drawn[1]


def test_random_states_of_each_process_have_the_states_of_megatrons_tracker(megatron4: Ranks, tmp_path: Path) -> None:
    drawn = megatron4.run(details.rng_of_processes, TP2, tmp_path / "0", "save")
    assert megatron4.run(details.rng_of_processes, TP2, tmp_path / "0", "load") == drawn
    assert drawn[0][-1] != drawn[1][-1], "tensor parallel ranks differ"


def test_random_states_of_another_layout_are_missing(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(details.rng, TP2, tmp_path / "0", "save")
    said = megatron4.run(details.rng, Layout(tp=4), tmp_path / "0", "load")
    assert "FqnMismatchError" in said[0]
    assert "rng_state/shard_0.0_1.4" in said[0]
    fresh = [megatron4.run(details.rng, Layout(tp=4), tmp_path / "0", "anyway") for _ in range(2)]
    assert fresh[0] == fresh[1]


@pytest.mark.parametrize("layout", [PP2, DP4], ids=str)
def test_only_the_optimizer_is_loaded(megatron4: Ranks, saved_bf16: Path, tmp_path: Path, layout: Layout) -> None:
    megatron4.run(details.load_optimizer_alone, BF16, layout, saved_bf16, tmp_path / "1")
    assert not differences(logical(saved_bf16), logical(tmp_path / "1"))


def test_an_optimizer_that_does_not_know_its_model_needs_it(megatron4: Ranks, saved_bf16: Path) -> None:
    whole = replace(BF16, distopt=False)
    said = megatron4.run(details.said_of_optimizer_alone, whole, saved_bf16)
    assert all("pass it as states['model']" in each for each in said)


@pytest.mark.parametrize("net", sample([NET, BF16, EXPERTS, replace(BF16, distopt=False)], BF16, EXPERTS))
def test_a_load_before_the_first_step_makes_states_and_nothing_else(megatron4: Ranks, net: Net) -> None:
    for names in megatron4.run(details.prepare, net, TP2 if not net.experts else Layout(ep=2)):
        assert any(name.endswith(".exp_avg") for name in names)


@pytest.mark.parametrize("net", [NET, BF16], ids=["fp32", "bf16"])
def test_data_parallel_ranks_state_the_same_blocks(megatron4: Ranks, net: Net) -> None:
    stated = megatron4.run(details.blocks, net, DP4)
    assert all(each == stated[0][0] for each, _ in stated)
    assert all(nothing for _, nothing in stated), "each parameter is on few of the ranks"


def test_weights_in_bf16_from_fp32_and_back(megatron4: Ranks, saved: Path, saved_bf16: Path, tmp_path: Path) -> None:
    megatron4.run(details.resave, BF16, PP2, saved, tmp_path / "low", "cast")
    low, first = logical(tmp_path / "low"), logical(saved)
    for fqn, tensor in of_kind(saved, "model").items():
        assert torch.equal(low["model", fqn], tensor.bfloat16())
        assert torch.equal(low["optimizer", f"state.{fqn}.master_param"], tensor), "the weights themselves, unrounded"
        assert torch.equal(low["optimizer", f"state.{fqn}.exp_avg"], first["optimizer", f"state.{fqn}.exp_avg"])
    megatron4.run(details.resave, NET, PP2, saved_bf16, tmp_path / "high", "cast")
    high, masters = of_kind(tmp_path / "high", "model"), of_kind(saved_bf16, "optimizer")
    assert all(torch.equal(tensor, masters[f"state.{fqn}.master_param"]) for fqn, tensor in high.items())


def test_hyper_parameters_come_back_in_other_groups(megatron4: Ranks, saved: Path, tmp_path: Path) -> None:
    megatron4.run(details.change_hyper, NET, TP2, saved, tmp_path / "1")
    groups = megatron4.run(details.hyper_of, NET, TP2_PP2, tmp_path / "1")
    assert {each for rank in groups for each in rank} == {(0.5, 0.75)}


def test_the_layout_is_no_hyper_parameter(saved: Path) -> None:
    keys = {name.rpartition(".")[2] for kind, name in hyper(saved) if kind == "optimizer"}
    assert {"lr", "betas", "weight_decay", "wd_mult"} <= keys
    assert not {"params", "is_expert_parallel"} & keys


def test_extra_states_are_objects_by_their_unique_key(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(details.extra_state, TP2, tmp_path / "0", "save")
    names = [name for kind, name in hyper(tmp_path / "0") if kind == "model"]
    assert sorted(names) == sorted(
        f"decoder.layers.{layer}.{part}._extra_state/shard_0_1"
        for layer in range(4)
        for part in ("mlp.linear_fc2", "self_attention.linear_proj")
    )
    for got in megatron4.run(details.extra_state, DP4, tmp_path / "0", "load"):
        assert [each.tolist() for each in got] == [[0, 1, 2]] * 8


def test_empty_extra_states_are_not_stored(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(details.extra_state, TP2, tmp_path / "0", "without")
    assert not hyper(tmp_path / "0")


def test_sharded_state_dicts_of_the_user_have_the_same_names(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(details.save, Net(), PP2, tmp_path / "0", ("model",))
    megatron4.run(details.sharded_dict, TP2, tmp_path / "0", tmp_path / "1")
    assert not differences(logical(tmp_path / "0"), logical(tmp_path / "1"))


def test_loss_scalers(megatron4: Ranks, tmp_path: Path) -> None:
    kept = megatron4.run(details.scaler, tmp_path / "0", "save")
    assert kept == [[2048.0, 0, 2]] * 4
    assert megatron4.run(details.scaler, tmp_path / "0", "load") == kept
    megatron4.run(details.scaler, tmp_path / "0", "into none")
    megatron4.run(details.scaler, tmp_path / "1", "without")
    assert megatron4.run(details.scaler, tmp_path / "1", "load") == [[1024.0, 0, 3]] * 4, "it stays as it is"


def test_between_megatron_and_plain_tensors(megatron4: Ranks, saved: Path, tmp_path: Path) -> None:
    whole = {fqn: torch.zeros_like(tensor) for fqn, tensor in of_kind(saved, "model").items()}
    bcp.load(saved, {"model": whole})
    assert not differences(whole, of_kind(saved, "model"))  # type: ignore[arg-type]
    bcp.save(tmp_path / "plain", {"model": {fqn: tensor + 1 for fqn, tensor in whole.items()}})
    megatron4.run(details.copy_model, NET, TP2_PP2, tmp_path / "plain", tmp_path / "back")
    assert not differences(logical(tmp_path / "plain"), logical(tmp_path / "back"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("precision", "set use_precision_aware_optimizer=False"),
        ("fsdp", "set use_megatron_fsdp=False"),
        ("fp8", "set fp8_param_gather=False"),
        ("late weights", "call disable_forward_pre_hook\\(\\) of the chunks first"),
        ("other model", "pass the modules that the optimizer was built for"),
        ("state dict", "pass what get_megatron_optimizer\\(\\) returned"),
        ("ranges", "megatron-core 0.15.3, 0.16.1 and 0.19.2; .* in which DistributedOptimizer has no gbuf_ranges; pin"),
    ],
)
def test_what_cannot_be_read_is_refused(megatron4: Ranks, change: str, words: str) -> None:
    for said, probed in megatron4.run(details.refused, NET, change):
        assert re.search(words, said), said
        assert probed == "nothing"


@pytest.mark.parametrize(
    ("net", "form"), [(replace(BF16, overlap=True), "dp_reshardable"), (BF16, "fully_reshardable")], ids=["many", "one"]
)
def test_a_sharded_state_dict_of_the_distributed_optimizer_is_refused(megatron4: Ranks, net: Net, form: str) -> None:
    words = rf"StateError: states\['\w+'\].* in its format '{form}'; pass the optimizer itself"
    for said in megatron4.run(details.sharded_optimizer, net, form):
        assert all(re.search(words, each) for each in said), said


def test_common_state_goes_back_to_its_places_or_is_named(megatron4: Ranks, tmp_path: Path) -> None:
    for found, said in megatron4.run(details.common_state, tmp_path / "0"):
        assert found == {"same": True}
        assert "FqnMismatchError" in said
        assert "model: iteration" in said


def test_the_probe_names_what_is_missing(megatron4: Ranks) -> None:
    module = "megatron.core.optimizer.distrib_optimizer"
    gone = (module, "DistributedOptimizer", "_copy_main_params_to_model_params")
    for said in megatron4.run(details.probe_without, *gone):
        assert "InputError: planner 'megatron' was tested with megatron-core 0.15.3, 0.16.1 and 0.19.2" in said
        assert "DistributedOptimizer has no _copy_main_params_to_model_params; pin megatron-core" in said
