from __future__ import annotations

from pathlib import Path

import megatron_fsdp as jobs
import pytest
import torch
from logical import differences, logical
from ranks import Ranks

pytestmark = pytest.mark.dist

SAYS_NOTHING = "is sharded by Megatron-FSDP, and does not say which of its rows are here; attach that"


def test_rows_that_megatron_fsdp_states_are_read_and_loaded(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(jobs.save_and_load, tmp_path)
    model = jobs.net()
    optimizer = jobs.stepped(model)
    expected = {("model", name): parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            expected["optimizer", f"state.{name}.{key}"] = value
    assert not differences(logical(tmp_path / "first"), expected)
    assert not differences(logical(tmp_path / "again"), expected)


def test_the_state_dict_of_a_megatron_fsdp_wrapper_is_read(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(jobs.save_state_dict, tmp_path)
    expected = {("model", f"module.{name}"): p.detach() for name, p in jobs.net().named_parameters()}
    assert not differences(logical(tmp_path), expected)


def test_megatron_fsdp_parameters_that_state_nothing_are_refused(megatron4: Ranks, tmp_path: Path) -> None:
    expected = {
        "wrapper": "the model is wrapped in MegatronFSDP, whose state_dict() communicates; pass its .module",
        "module": f"model tensor '0.weight' on rank RANK {SAYS_NOTHING}",
        "parameters": f"model tensor '0.weight' on rank RANK {SAYS_NOTHING}",
        "optimizer": "StateError: ",  # ranks without rows of a parameter cannot tell which one it is
        "version 2, DTensor": f"model tensor 'w' on rank RANK {SAYS_NOTHING}",
        "version 2, local": f"model tensor 'w' on rank RANK {SAYS_NOTHING}",
    }
    for rank, errors in enumerate(megatron4.run(jobs.without_statements, tmp_path / "none")):
        assert errors.keys() == expected.keys()
        for name, text in expected.items():
            assert text.replace("RANK", str(rank)) in errors[name], (name, errors[name])
    assert not (tmp_path / "none" / "metadata.arrow").exists()


def test_tensor_parallel_parameters_whose_parts_have_the_right_size_at_other_rows(
    megatron4: Ranks, tmp_path: Path
) -> None:
    errors = megatron4.run(jobs.save_after_tp, tmp_path)
    found = logical(tmp_path)
    assert all(torch.equal(found["model", name], torch.arange(48.0).view(16, 3)) for name in jobs.ROWS)
    for said in errors:
        assert said.keys() == jobs.ROWS.keys()
        assert all(SAYS_NOTHING in text for text in said.values()), said
