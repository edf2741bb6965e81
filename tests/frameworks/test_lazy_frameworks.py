from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lazy_jobs import Case, Megatron, assert_lazy_is_eager
from megatron_gpt import Layout, Net
from ranks import Ranks
from samples import sample

pytestmark = pytest.mark.dist

FP32, TP2 = Net(layers=2), Layout(tp=2)
BF16 = replace(FP32, bf16=True)
NETS = {
    "fp32": FP32,
    "bf16": BF16,
    "bf16, late gather": replace(BF16, overlap=True),
    "bf16, no shards": replace(BF16, distopt=False),
}
KINDS = ["z1/fp32", "z1/bf16", "z2/fp16", "z3/fp32", "z3/bf16"]


@pytest.mark.parametrize("kind", sample(KINDS, "z1/fp32"))
def test_a_step_of_deepspeed_waits_until_the_state_before_it_is_copied(
    deepspeed4: Ranks, tmp_path: Path, kind: str
) -> None:
    assert all(assert_lazy_is_eager(deepspeed4, tmp_path, Case(kind)))


@pytest.mark.parametrize("kind", sample(["z2/bf16", "z3/bf16"], "z3/bf16"))
def test_the_state_of_deepspeed_is_copied_during_backward(deepspeed4: Ranks, tmp_path: Path, kind: str) -> None:
    assert_lazy_is_eager(deepspeed4, tmp_path, Case(kind, "backward", micro=2))


@pytest.mark.parametrize("net", sample(NETS, "bf16, late gather"))
def test_a_step_of_megatron_waits_until_the_state_before_it_is_copied(
    megatron4: Ranks, tmp_path: Path, net: str
) -> None:
    assert all(assert_lazy_is_eager(megatron4, tmp_path, Case(Megatron(NETS[net], TP2))))


def test_the_state_of_megatron_is_copied_during_backward(megatron4: Ranks, tmp_path: Path) -> None:
    case = Case(Megatron(NETS["bf16, late gather"], TP2), "backward", micro=2)
    assert_lazy_is_eager(megatron4, tmp_path, case)
