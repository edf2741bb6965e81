"""One safetensors file of a checkpoint, read by safetensors itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from exported import ODD, READABLE, assert_same, documented, folders, odd_states, trained_states
from golden.cases import codecs_of
from golden.expected import DATA, read
from safetensors import safe_open
from safetensors.torch import load_file

import bcp
from bcp.errors import ExistsError, FqnMismatchError, InputError, MissingCodecError

UNKNOWN = ("complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def header_of(path: Path) -> dict[str, dict[str, object]]:
    """Return the header of a safetensors file."""
    with path.open("rb") as file:
        header: dict[str, dict[str, object]] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


@pytest.mark.parametrize("name", READABLE)
def test_every_golden_checkpoint_is_read_by_safetensors(name: str, tmp_path: Path) -> None:
    for number, path in enumerate(folders(name)):
        expected = documented(path)
        for kind in sorted({kind for kind, _ in expected}):
            wanted = {fqn: tensor for (of, fqn), tensor in expected.items() if of == kind}
            storable = {fqn: each for fqn, each in wanted.items() if str(each.dtype)[6:] not in UNKNOWN}
            target = tmp_path / f"{number}-{kind}.safetensors"
            ckpt = bcp.Checkpoint(path)
            if len(storable) < len(wanted):
                with pytest.raises(InputError, match="safetensors has no dtype"):
                    bcp.tools.export_safetensors(ckpt, target, kind=kind, glob="*complex128*")
                continue
            result = bcp.tools.export_safetensors(ckpt, target, kind=kind)
            assert_same(load_file(target), wanted)
            assert (result.tensors, result.files) == (len(wanted), (target.name,))
            assert result.nbytes == sum(tensor.nbytes for tensor in wanted.values())


@pytest.mark.parametrize("budget", [1, 1 << 20, 256 << 20])
def test_tensors_of_every_dtype_and_name_arrive_bit_by_bit(budget: int, tmp_path: Path) -> None:
    states = odd_states()
    bcp.save(tmp_path / "ckpt", {"model": states})
    target = tmp_path / "out" / "model.safetensors"
    told: list[tuple[int, int]] = []
    bcp.tools.export_safetensors(
        tmp_path / "ckpt", target, budget_bytes=budget, progress=lambda *both: told.append(both)
    )
    assert_same(load_file(target), states)
    with safe_open(target, "pt") as file:
        assert same_names(file.keys(), states)
        assert file.metadata() == {"format": "pt"}
    total = sum(tensor.nbytes for tensor in states.values())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def same_names(found: object, states: dict[str, torch.Tensor]) -> bool:
    return sorted(found) == sorted(states)  # type: ignore[call-overload]  # safetensors has no types


def test_tensors_larger_than_the_budget_are_cut_into_parts(tmp_path: Path) -> None:
    states = {"a": torch.arange(3_000_001), "b": torch.arange(5_000_003, dtype=torch.float32), "c": torch.ones(7)}
    bcp.save(tmp_path / "ckpt", {"model": states}, options=bcp.SaveOptions(part_bytes=1 << 20))
    target = tmp_path / "model.safetensors"
    bcp.tools.export_safetensors(tmp_path / "ckpt", target, budget_bytes=8 << 20)
    assert_same(load_file(target), states)


def test_a_cast_changes_floating_tensors_only(tmp_path: Path) -> None:
    states = {"f": torch.randn(300, 7), "d": torch.randn(5).double(), "i": torch.arange(4), "b": torch.ones(2) > 0}
    bcp.save(tmp_path / "ckpt", {"model": states})
    target = tmp_path / "model.safetensors"
    for dtype in (torch.bfloat16, "float16", "half", torch.float8_e4m3fn):
        bcp.tools.export_safetensors(tmp_path / "ckpt", target, dtype=dtype, overwrite=True)
        wanted = getattr(torch, str(dtype).removeprefix("torch."))
        expected = {name: each.to(wanted) if each.is_floating_point() else each for name, each in states.items()}
        assert_same(load_file(target), expected)


def test_a_pattern_and_new_names(tmp_path: Path) -> None:
    states = {f"layers.{n}.w": torch.full((2,), n) for n in range(3)} | {"head": torch.ones(1)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    target = tmp_path / "model.safetensors"
    bcp.tools.export_safetensors(
        tmp_path / "ckpt", target, glob="layers.*", rename=lambda name: name.replace("layers", "h")
    )
    assert_same(load_file(target), {f"h.{n}.w": states[f"layers.{n}.w"] for n in range(3)})
    bcp.tools.export_safetensors(tmp_path / "ckpt", target, rename={"head": "lm_head"}, overwrite=True)
    assert_same(load_file(target), {"lm_head" if name == "head" else name: each for name, each in states.items()})


def test_states_of_an_optimizer(tmp_path: Path) -> None:
    states = trained_states()
    bcp.save(tmp_path / "ckpt", states)
    target = tmp_path / "optimizer.safetensors"
    bcp.tools.export_safetensors(tmp_path / "ckpt", target, kind="optimizer")
    moments = {
        f"state.{name}.{key}": states["optimizer"].state[parameter][key]
        for name, parameter in states["model"].named_parameters()
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
    assert_same(load_file(target), moments)


@pytest.mark.parametrize("name", ["zstd", "codec-pair"])
def test_a_checkpoint_with_codecs_needs_them(name: str, tmp_path: Path) -> None:
    path, target = DATA / name / "checkpoint", tmp_path / "model.safetensors"
    with pytest.raises(MissingCodecError):
        bcp.tools.export_safetensors(path, target)
    assert not list(tmp_path.iterdir())
    record = read(DATA / name)
    bcp.tools.export_safetensors(path, target, options=bcp.LoadOptions(codecs=codecs_of(record.codecs)))
    wanted = {key[6:]: tensor for key, tensor in record.parts[0].tensors.items() if key.startswith("model/")}
    assert_same(load_file(target), wanted)


def test_a_role(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2)}}, role="actor")
    bcp.tools.export_safetensors(tmp_path / "ckpt", tmp_path / "actor.safetensors", role="actor")
    assert_same(load_file(tmp_path / "actor.safetensors"), {"w": torch.ones(2)})


def test_open_checkpoints_and_coroutines(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2)}})

    async def exports() -> None:
        await bcp.tools.aexport_safetensors(tmp_path / "ckpt", tmp_path / "0.safetensors")
        await bcp.tools.aexport_safetensors(bcp.Checkpoint(tmp_path / "ckpt"), tmp_path / "1.safetensors")
        async with bcp.AsyncCheckpoint(tmp_path / "ckpt") as ckpt:
            await bcp.tools.aexport_safetensors(ckpt, tmp_path / "2.safetensors")
            assert ckpt["w"].nbytes == 8, "it stays open"
            with pytest.raises(InputError, match="belongs to its event loop"):
                bcp.tools.export_safetensors(ckpt, tmp_path / "3.safetensors")

    asyncio.run(exports())
    for number in range(3):
        assert_same(load_file(tmp_path / f"{number}.safetensors"), {"w": torch.ones(2)})


def test_larger_elements_come_first_and_each_is_aligned(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": odd_states()})
    target = tmp_path / "model.safetensors"
    bcp.tools.export_safetensors(tmp_path / "ckpt", target)
    start = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    assert start % 64 == 0
    sizes = {name: tensor.itemsize for name, tensor in odd_states().items()}
    for name, entry in header_of(target).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % sizes[name] == 0  # type: ignore[index]  # JSON


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"glob": "nothing*"}, FqnMismatchError, "no model tensor that matches glob='nothing\\*'; it has 'v', 'w'"),
        ({"glob": 3}, InputError, "glob=3"),
        ({"kind": "extra_states"}, InputError, "kind='extra_states'"),
        ({"kind": "optimizer"}, FqnMismatchError, "no optimizer tensor"),
        ({"dtype": torch.int8}, InputError, "dtype=torch.int8 is no floating dtype"),
        ({"dtype": "float4_e2m1fn_x2"}, InputError, "no floating dtype of whole bytes"),
        ({"dtype": "float99"}, InputError, "dtype='float99' is no floating dtype"),
        ({"rename": lambda _: "same"}, InputError, "gives the name 'same' to both 'v' and 'w'"),
        ({"rename": lambda _: None}, InputError, "rename answers None for 'v'"),
        ({"rename": 3}, InputError, "rename=3"),
        ({"rename": {"w": "__metadata__"}}, InputError, "reserved"),
        ({"budget_bytes": 0}, InputError, "budget_bytes=0"),
        ({"progress": 3}, InputError, "progress=3"),
        ({"coordinator": 3}, InputError, "coordinator=3"),
        ({"nonsense": 3}, TypeError, "no keyword 'nonsense'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2), "v": torch.ones(1)}})
    with pytest.raises(error, match=words):
        bcp.tools.export_safetensors(tmp_path / "ckpt", tmp_path / "out" / "m.safetensors", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_two_kinds_do_not_share_a_file(tmp_path: Path) -> None:
    states = trained_states()
    model = states["model"].state_dict() | {"state.0.weight.exp_avg": torch.ones(1)}
    bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": states["optimizer"]})
    for export in (bcp.tools.export_safetensors, bcp.tools.export_hf):
        with pytest.raises(InputError, match="kind=None"):
            export(tmp_path / "ckpt", tmp_path / "out", kind=None)  # type: ignore[arg-type]  # wrong
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_any(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2)}})
    for target in ("", f"{tmp_path}/", f"{tmp_path}/..", "memory://", 3, None):
        with pytest.raises(InputError, match="target="):
            bcp.tools.export_safetensors(tmp_path / "ckpt", target)  # type: ignore[arg-type]
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        bcp.tools.export_safetensors(tmp_path / "ckpt", tmp_path / "folder", overwrite=True)


def test_a_file_that_is_there_stays_unless_it_may_go(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2)}})
    target = tmp_path / "model.safetensors"
    for content in (b"mine", b""):
        target.write_bytes(content)
        with pytest.raises(ExistsError, match=r"model\.safetensors already; pass overwrite=True"):
            bcp.tools.export_safetensors(tmp_path / "ckpt", target)
        assert target.read_bytes() == content
    bcp.tools.export_safetensors(tmp_path / "ckpt", target, overwrite=True)
    assert_same(load_file(target), {"w": torch.ones(2)})


def test_names_that_a_header_has_to_escape(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {ODD: torch.ones(2)}})
    bcp.tools.export_safetensors(tmp_path / "ckpt", tmp_path / "odd.safetensors")
    assert list(load_file(tmp_path / "odd.safetensors")) == [ODD]
