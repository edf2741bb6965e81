from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import any_to_any
import deepspeed_job
import pytest
import torch
from any_to_any import How, Task, data_parallel, dtype_of, goes_on
from exact import Exact, Twin, as_dtype, trained
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks
from samples import sample

import bcp
from bcp.errors import InputError
from bcp.planners.deepspeed import DeepSpeedPlanner, holds_deepspeed

pytestmark = pytest.mark.dist

Saved = Callable[[How], Path]

DDP = Layout("ddp", size=2)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def twin_of(how: How) -> Twin:
    return trained(2, data_parallel(how), dtype=dtype_of(how))


def task_of(before: How, after: How, *, used: bool) -> Task:
    cast = (dtype_of(before), dtype_of(after)) == (torch.float32, torch.bfloat16)
    return Task(steps_before=int(used), options=bcp.LoadOptions(cast=cast))


def test_the_jobs_have_every_optimizer(deepspeed4: Ranks) -> None:
    kinds = ["z0/bf16-all", "z0/bf16-all/fused", "z1/bf16", "z1/bf16-all", "z2/bf16", "z3/bf16"]
    assert deepspeed4.run(deepspeed_job.optimizers, kinds)[0] == [
        *("FP16_UnfusedOptimizer", "FP16_Optimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer"),
        *("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"),
    ]


TRAINED = [
    *("z0/fp32", "z1/fp32", "z2/fp32", "z3/fp32", "z1/bf16", "z2/bf16", "z3/bf16", "z1/bf16-all", "z2/fp16", "z3/fp16"),
    *("z2-offload/bf16", "z3-offload/bf16", "z3-hpz/fp32", "z1/bf16/pairs", "z3/fp32/pairs"),
]


@pytest.mark.parametrize("kind", sample(TRAINED, *TRAINED[::2]))
def test_a_checkpoint_is_what_unsharded_training_gives(saved: Saved, kind: str) -> None:
    assert not differences(logical(saved(kind)), twin_of(kind).state())


CHANGES = [
    ("z3/fp32", "z3-offload/fp32"),
    ("z3-offload/fp32", "z2-offload/fp32"),
    ("z1/bf16", "z3/bf16"),
    ("z3/bf16", "z2/bf16"),
    ("z2/bf16", "z1/bf16"),
    ("z1/bf16-all", "z1/bf16"),
    ("z3-hpz/fp32", "z3-hpz/fp32"),
    ("z3/fp16", "z2/fp16-anew"),
    ("z2/fp16", "z3/fp16-anew"),
    ("z1/bf16", "z3/bf16/pairs"),
    ("z3/fp32/pairs", "z1/fp32/pairs"),
    (DDP, "z0/fp32"),
    ("z2/bf16", "z3/fp32"),
    ("z1/fp32", "z2/bf16"),
]


BOTH = 8
"""So many of the changes are made before the first step and after it, the others alternate."""


@pytest.mark.parametrize(
    ("before", "after", "used"),
    sample(
        [(*change, used) for at, change in enumerate(CHANGES) for used in (False, True) if at < BOTH or used == at % 2],
        *((*change, bool(at % 2)) for at, change in enumerate(CHANGES) if at % 3 == 2),
    ),
)
def test_training_goes_on_in_another_stage_or_framework(
    deepspeed4: Ranks, tmp_path: Path, saved: Saved, before: How, after: How, *, used: bool
) -> None:
    goes_on(deepspeed4, saved(before), tmp_path, twin_of(before), after, task_of(before, after, used=used))


FEWER = [
    ("z1/fp32", "z1/fp32"),
    ("z3/fp32", "z3/fp32"),
    ("z1/bf16", "z1/bf16"),
    ("z3/bf16", "z2/bf16"),
    ("z2/bf16", DDP),
]


@pytest.mark.parametrize(
    ("before", "after", "used"),
    sample(
        [(*change, used) for change in FEWER for used in (False, True)],
        *((*change, bool(at % 2)) for at, change in enumerate(FEWER) if at % 2),
    ),
)
def test_training_goes_on_with_fewer_ranks(
    two: Ranks, tmp_path: Path, saved: Saved, before: How, after: How, *, used: bool
) -> None:
    goes_on(two, saved(before), tmp_path, twin_of(before), after, task_of(before, after, used=used))


@pytest.mark.parametrize(
    ("kind", "used"),
    sample(
        [("z1/bf16", False), ("z2/fp32", True), ("z3/bf16", False), ("z3-hpz/fp32", True)],
        ("z3/bf16", False),
    ),
)
def test_frozen_parameters_have_weights_and_no_states(
    deepspeed4: Ranks, tmp_path: Path, kind: str, *, used: bool
) -> None:
    model = {"frozen": True, "tied": False}
    make = partial(Exact, **model)
    deepspeed4.run(any_to_any.train, tmp_path / "saved", kind, make)
    twin = trained(2, 4, dtype=dtype_of(kind), **model)
    assert not differences(logical(tmp_path / "saved"), twin.state())
    deepspeed4.run(any_to_any.go_on, tmp_path / "saved", tmp_path, kind, Task(make, int(used)))
    assert not differences(logical(tmp_path / "again"), twin.state())
    twin.step(2, 4)
    assert not differences(logical(tmp_path / "stepped"), twin.state())


@pytest.mark.parametrize("kind", sample(["z0/bf16-all", "z0/bf16-all/fused"], "z0/bf16-all"))
def test_stage_0_with_16_bits_keeps_its_masters(deepspeed4: Ranks, tmp_path: Path, kind: str) -> None:
    twin = Twin(dtype=torch.bfloat16)
    for master in twin.masters.values():
        master.grad = torch.zeros_like(master)
    twin.optimizer.step()  # as the optimizers of stage 0 do when they are made
    for step in range(2):
        twin.step(step, 4)
    deepspeed4.run(any_to_any.train, tmp_path / "saved", kind)
    deepspeed4.run(any_to_any.go_on, tmp_path / "saved", tmp_path, kind)
    deepspeed4.run(any_to_any.go_on, tmp_path / "saved", tmp_path / "z3", "z3/bf16")
    for path in (tmp_path / "saved", tmp_path / "again", tmp_path / "z3" / "again"):
        assert not differences(logical(path), twin.state())
    twin.step(2, 4)
    for path in (tmp_path / "stepped", tmp_path / "z3" / "stepped"):
        assert not differences(logical(path), twin.state())


@pytest.mark.parametrize(
    ("source", "kind"),
    sample(
        itertools.product([DDP, "z3/bf16"], ["z1/bf16", "z2/bf16", "z3/bf16", "z3/fp32"]),
        *[(DDP, "z3/bf16"), ("z3/bf16", "z1/bf16")],
    ),
)
def test_a_load_of_weights_alone_fills_the_masters(
    deepspeed4: Ranks, tmp_path: Path, saved: Saved, source: How, kind: str
) -> None:
    deepspeed4.run(deepspeed_job.reload_model, saved(source), tmp_path / "stepped", kind, "engine")
    state = logical(saved(source))
    if dtype_of(kind) is torch.float32:
        state = as_dtype(state, torch.float32)  # from saved masters, where the weights were not saved in fp32
    weights = {fqn: value for (group, fqn), value in state.items() if group == "model"}
    twin = Twin()
    twin.model.load_state_dict({fqn: value.to(twin.model.state_dict()[fqn].dtype) for fqn, value in weights.items()})
    twin.step(2, 4)
    assert not differences(logical(tmp_path / "stepped"), as_dtype(twin.state(), dtype_of(kind)))


def test_the_module_of_zero_3_knows_its_masters(deepspeed4: Ranks, tmp_path: Path, saved: Saved) -> None:
    for part in ("engine", "module"):
        deepspeed4.run(deepspeed_job.reload_model, saved(DDP), tmp_path / part, "z3/bf16", part)
    assert not differences(logical(tmp_path / "module"), logical(tmp_path / "engine"))


@pytest.mark.parametrize("kind", sample(["z1/bf16", "z2/fp32", "z3/bf16", "z0/fp32"], "z2/fp32", "z3/bf16"))
def test_module_and_optimizer_are_as_good_as_the_engine(
    deepspeed4: Ranks, tmp_path: Path, saved: Saved, kind: str
) -> None:
    deepspeed4.run(deepspeed_job.parts, tmp_path / "parts", kind)
    assert not differences(logical(tmp_path / "parts"), logical(saved(kind)))


@pytest.mark.parametrize(
    ("before", "after"), sample([("z1/bf16", "z3/bf16"), ("z3/fp32", "z2/fp32")], ("z1/bf16", "z3/bf16"))
)
def test_a_learning_rate_follows_its_parameter_into_another_group(
    deepspeed4: Ranks, tmp_path: Path, before: str, after: str
) -> None:
    deepspeed4.run(deepspeed_job.learning_rates, None, tmp_path / "saved", before)
    found = deepspeed4.run(deepspeed_job.learning_rates, tmp_path / "saved", tmp_path / "again", after)
    assert found == [[0.25, 0.5]] * 4
    assert hyper(tmp_path / "again") == hyper(tmp_path / "saved")


def test_a_dynamic_loss_scale_is_loaded(deepspeed4: Ranks, tmp_path: Path, saved: Saved) -> None:
    deepspeed4.run(any_to_any.go_on, saved("z2/fp16"), tmp_path, "z3/fp16-anew")
    scales = [hyper(path)["optimizer", "loss_scaler.cur_scale"] for path in (saved("z2/fp16"), tmp_path / "again")]
    steps = [hyper(tmp_path / name)["optimizer", "loss_scaler.cur_iter"] for name in ("again", "stepped")]
    assert (scales, steps) == ([16, 16], [2, 3])


@pytest.mark.parametrize("kind", ["z2/fp32", "z3/fp32"])
def test_no_full_tensor_is_made(deepspeed4: Ranks, tmp_path: Path, kind: str) -> None:
    assert max(max(made) for made in deepspeed4.run(deepspeed_job.sizes, tmp_path, kind)) < 4 << 20


@pytest.mark.parametrize(("kind", "count"), [("z3/fp32", 6), ("z3-offload/bf16", 13)])
def test_weights_that_are_whole_under_zero_3_are_loaded_too(
    deepspeed4: Ranks, saved: Saved, kind: str, count: int
) -> None:
    source = saved("z3/" + kind.split("/")[1])
    expected = logical(source)
    for found in deepspeed4.run(deepspeed_job.whole_copies, source, kind):
        assert len(found) == count
        assert all(torch.equal(tensor, expected["model", fqn]) for fqn, tensor in found.items())


@pytest.mark.parametrize("kind", sample(["z2/fp32", "z3/fp32"], "z3/fp32"))
def test_the_masters_of_tied_weights_are_loaded_by_the_name_that_was_saved(
    deepspeed4: Ranks, tmp_path: Path, kind: str
) -> None:
    deepspeed4.run(deepspeed_job.save_one_name, tmp_path / "saved")
    deepspeed4.run(deepspeed_job.reload_model, tmp_path / "saved", tmp_path / "stepped", kind, "engine")
    twin = Twin()
    twin.step(2, 4)
    assert not differences(logical(tmp_path / "stepped"), twin.state())


def test_a_load_makes_second_copies_of_weights_void(deepspeed4: Ranks, tmp_path: Path) -> None:
    for before, after in deepspeed4.run(deepspeed_job.second_copies, tmp_path):
        assert (before > 0, after) == (True, 0)


@pytest.mark.parametrize("kind", ["z1/bf16", "z2/fp32"])
def test_deepspeed_finds_states_that_were_loaded_before_the_first_step(
    deepspeed4: Ranks, saved: Saved, kind: str
) -> None:
    assert deepspeed4.run(deepspeed_job.linked, saved(kind), kind) == [True] * 4


def test_optimizers_of_deepspeed_count_with_an_int(deepspeed4: Ranks, tmp_path: Path, saved: Saved) -> None:
    assert deepspeed4.run(deepspeed_job.counted, saved("z1/fp32"), tmp_path) == [(int, 2)] * 4
    steps = [value.item() for name, value in logical(tmp_path).items() if name[1].endswith(".step")]
    assert set(steps) == {2.0}


REFUSALS = {
    "nvme": "offload_optimizer.device is 'nvme'",
    "nvme weights": "offload_param.device is 'nvme'",
    "ratio": "offload_optimizer.ratio is 0.5",
    "zenflow": "zenflow",
    "offloaded": "engine.reload_states()",
    "experts": "'cube' belongs to MoE experts",
    "autotp": "'cube' is split by AutoTP",
    "mpu": "mpu splits tensors over 2 ranks",
    "quantized": "'cube' is kept quantized",
    "gathering": "gathering 'cube' at the moment",
    "replaced": "lies elsewhere than where DeepSpeed put it",
    "pipeline": "PipelineEngine",
    "no optimizer": "engine without an optimizer",
    "no optimizer, ZeRO-3": "engine without an optimizer",
    "inner optimizer": "pass the engine, or the optimizer that deepspeed.initialize() returned",
    "state dict": "states['model'] is a OrderedDict",
    "module alone": "fp32 masters would undo the load",
}


@pytest.mark.parametrize("case", sample(REFUSALS, *list(REFUSALS)[::3]))
def test_what_cannot_be_read_is_refused(deepspeed4: Ranks, tmp_path: Path, case: str) -> None:
    for said in deepspeed4.run(deepspeed_job.refusal, tmp_path, case):
        assert said.startswith("StateError: ")
        assert REFUSALS[case] in said


def test_modules_that_cannot_take_their_state_are_refused_before_anything_is_written(
    deepspeed4: Ranks, tmp_path: Path
) -> None:
    for (scaled, looking), unexpected in deepspeed4.run(deepspeed_job.refused_modules, tmp_path):
        assert scaled.startswith("FqnMismatchError: ")
        assert "model: scale" in scaled
        assert looking.startswith("StateError: DeepSpeed: under ZeRO-3, the post-hook of load_state_dict of Looking")
        assert "GatheredParameters" in looking
        assert unexpected == ("model: scale",)


def test_probe_says_which_versions_run_and_were_tested(deepspeed4: Ranks) -> None:
    said = f"planner 'deepspeed' was tested with deepspeed 0.19.8; this is deepspeed {metadata.version('deepspeed')}"
    assert deepspeed4.run(deepspeed_job.probe) == [said] * 4


def test_probe_names_what_another_version_lacks(deepspeed4: Ranks) -> None:
    for said in deepspeed4.run(deepspeed_job.probe_changed):
        assert "deepspeed.runtime.bf16_optimizer.BF16_Optimizer has no _link_all_hp_params" in said


def test_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(InputError, match="install deepspeed"):
        DeepSpeedPlanner().probe()


def test_nothing_else_is_taken_for_deepspeed() -> None:
    model = Exact()
    optimizer = torch.optim.AdamW(model.parameters())
    assert not any(
        map(holds_deepspeed, [{}, {"model": model, "optimizer": optimizer}, {"model": {"w": torch.ones(1)}}])
    )
