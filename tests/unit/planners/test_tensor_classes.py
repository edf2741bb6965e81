"""Every class of tensors that torch has, as a leaf: it comes back bit for bit, or is refused by name at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from layouts import same_bits
from nested import nested
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import bcp


class Inner(torch.Tensor):
    """Stands for a tensor inside of it, and lets torch work with that, as those of torchao do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, *_: Any) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor, *_: Any) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner.float() if isinstance(arg, Inner) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Mute(Inner):
    """Is a wrapper that answers nothing, not even its layout."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise RuntimeError(f"{func} is not for you")


class Refusing(torch.Tensor):
    """Has memory of its own, and answers nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{func} is not for you")


class Stating(Inner):
    """States its blocks by torch's hooks: (offset, view) of each."""

    def __init__(self, inner: torch.Tensor, blocks: Callable[[], list[tuple[Any, Any]]]) -> None:
        super().__init__(inner)
        self.blocks = blocks

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([at]), torch.Size([3])) for at, _ in self.blocks()]

    def __get_tensor_shard__(self, index: Any) -> Any:
        return self.blocks()[index.index][1]


class Marked(nn.Parameter):
    """Is plain but for its class."""


def stating(*blocks: tuple[Any, Any]) -> Stating:
    return Stating(torch.zeros(6), lambda: list(blocks))


def broken() -> Any:
    raise ZeroDivisionError("no blocks")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def functional() -> torch.Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(2))


def escaped(transform: Callable[..., Any], *shape: int) -> torch.Tensor:
    """Return what a function sees inside of one of ``torch.func``'s transforms, after it."""
    seen = []
    transform(lambda x: (seen.append(x), x.sum())[1])(torch.ones(*shape))
    return seen[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def dual() -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.make_dual(torch.tensor([1.5, 2.5]), torch.ones(2))


def conjugated() -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 1j]).conj()


WRAPPED = "which does not say where its memory is; pass the plain tensors inside it"
NOWHERE = "elements but no memory: .*; pass a .clone"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapper": (lambda: Inner(torch.ones(2).char()), f"is a Inner, {WRAPPED}"),
    "wrapper, parameter": (
        lambda: nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))),
        f"is a TwoTensor, {WRAPPED}",
    ),
    "two": (lambda: TwoTensor(torch.ones(2), torch.ones(2)), f"is a TwoTensor, {WRAPPED}"),
    "async": (lambda: AsyncCollectiveTensor(torch.ones(2)), f"is a AsyncCollectiveTensor, {WRAPPED}"),
    "masked": (lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])), f"is a MaskedTensor, {WRAPPED}"),
    "mute": (lambda: Mute(torch.ones(2)), "is a Mute, which raises RuntimeError when it is asked what it is; pass"),
    "refusing": (lambda: torch.ones(2).as_subclass(Refusing), "is a Refusing, which raises TypeError"),
    "fake": (fake, f"is a FakeTensor, {WRAPPED}"),
    "functional": (functional, f"is a FunctionalTensor, {WRAPPED}"),
    "functional, of C++": (lambda: torch._to_functional_tensor(torch.ones(2)), f"has 2 {NOWHERE}"),
    "vmap": (lambda: escaped(torch.vmap, 3, 2), f"has 2 {NOWHERE}"),
    "grad": (lambda: escaped(torch.func.grad, 2), f"has 2 {NOWHERE}"),
    "zeros": (lambda: torch._efficientzerotensor(3), f"has 3 {NOWHERE}"),
    "freed": (freed, f"has 4 {NOWHERE}"),
    "nested": (
        lambda: nested([torch.ones(2), torch.ones(3)]),
        "is a nested tensor; pass its parts",
    ),
    "jagged": (
        lambda: nested([torch.ones(2), torch.ones(3)], "jagged"),
        "is a nested tensor; pass its parts",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "is quantized; pass int_repr"),
    "quantized, channels": (
        lambda: torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "is quantized; pass int_repr",
    ),
    "coo": (lambda: torch.eye(2).to_sparse(), "has the layout torch.sparse_coo; pass to_dense"),
    "coo, empty": (lambda: torch.sparse_coo_tensor(size=(0, 3)), "has the layout torch.sparse_coo; pass to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "has the layout torch.sparse_csr; pass to_dense"),
    "csc": (lambda: torch.eye(2).to_sparse_csc(), "has the layout torch.sparse_csc; pass to_dense"),
    "bsr": (lambda: torch.eye(4).to_sparse_bsr((2, 2)), "has the layout torch.sparse_bsr; pass to_dense"),
    "bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "has the layout torch.sparse_bsc; pass to_dense"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "has the layout torch._mkldnn; pass to_dense"),
    "lazy parameter": (nn.UninitializedParameter, "is uninitialized; run one forward"),
    "lazy buffer": (nn.UninitializedBuffer, "is uninitialized; run one forward"),
    "meta": (lambda: torch.empty(2, device="meta"), "is on the meta device and has no values; materialise it"),
    "meta, empty": (lambda: torch.empty(0, device="meta"), "is on the meta device and has no values; materialise it"),
    "untyped storage": (lambda: torch.ones(3).untyped_storage(), "is a UntypedStorage, .*; pass a tensor of it"),
    "typed storage": (lambda: torch.ones(3).storage(), "is a TypedStorage, .*; pass a tensor of it"),
    "blocks, dtype": (lambda: stating((0, torch.ones(3).half())), "float32, but has memory of torch.float16 here"),
    "blocks, meta": (lambda: stating((0, torch.ones(3, device="meta"))), "its block .* is on the meta device"),
    "blocks, sparse": (lambda: stating((0, torch.ones(3).to_sparse())), "its block .* has the layout torch.sparse_coo"),
    "blocks, wrapper": (lambda: stating((0, Inner(torch.ones(3)))), "its block .* is a Inner, which does not say"),
    "blocks, again": (
        lambda: stating((0, Stating(torch.ones(3), list))),
        "its block .* is a Stating; return a plain tensor",
    ),
    "blocks, none": (lambda: stating((0, None)), "states a block .* but gives NoneType"),
    "blocks, outside": (lambda: stating((4, torch.ones(3))), r"outside of the shape \(6,\)"),
    "blocks, raising": (lambda: Stating(torch.zeros(6), broken), "Stating raised ZeroDivisionError: no blocks"),
    **{
        f"{sign}int{bits}": (
            lambda sign=sign, bits=bits: torch.empty(2, dtype=getattr(torch, f"{sign}int{bits}")),
            f"is {sign}int{bits}, which torch cannot copy; pass a view of it",
        )
        for sign in ("", "u")
        for bits in range(1, 8)
    },
}
KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "marked": lambda: Marked(torch.randn(3)),
    "buffer": lambda: nn.Buffer(torch.randn(3)),
    "dual": dual,
    "inference": lambda: torch.inference_mode()(torch.randn)(3),
    "empty": lambda: torch.empty(0, 3),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "conjugated": conjugated,
    "negated": lambda: conjugated().imag,
}
DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    - {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    - {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)},
    key=str,
)


def module_of(leaf: Any) -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", leaf)
    return module


def optimizer_of(leaf: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight]["buffer"] = leaf
    return net, optimizer


PLACES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "model": ("model {} 'deep.0.x'", lambda leaf: {"model": {"deep": [{"x": leaf}]}}),
    "optimizer": ("optimizer {} 'deep.0.x'", lambda leaf: {"optimizer": {"deep": [{"x": leaf}]}}),
    "whole": ("model {} 'model'", lambda leaf: {"model": leaf}),
    "module": ("model {} 'x'", lambda leaf: {"model": module_of(leaf)}),
    "state": (
        "optimizer {} 'state.weight.buffer'",
        lambda leaf: dict(zip(("model", "optimizer"), optimizer_of(leaf), strict=True)),
    ),
}


def made(make: Callable[[], Any]) -> Any:
    """Make a leaf; torch warns of prototypes, and of what it imports itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for every place."""
    path = tmp_path_factory.mktemp("good")
    for place, (_, states) in PLACES.items():
        bcp.save(path / place, states(torch.ones(2)))
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_without_plain_memory_are_refused_by_name(good: Path, tmp_path: Path, case: str) -> None:
    make, words = REFUSED[case]
    leaf = made(make)
    places = PLACES if isinstance(leaf, torch.Tensor) else ("model", "optimizer", "state")
    for place in places:
        label, states = PLACES[place]
        said = re.escape(label.format("tensor" if isinstance(leaf, torch.Tensor) else "leaf")) + rf" on rank 0.*{words}"
        with pytest.raises(bcp.StateError, match=said):
            bcp.save(tmp_path / place, states(leaf))
        if place == "module" and case.startswith("meta"):
            continue  # a load gives memory to modules on the meta device
        with pytest.raises(bcp.StateError, match=said):
            bcp.load(good / place, states(leaf))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("case", KEPT)
def test_other_tensors_come_back_to_the_bit(tmp_path: Path, case: str) -> None:
    leaf = made(KEPT[case])
    values = leaf.detach().resolve_conj().resolve_neg()
    for place, (_, states) in PLACES.items():
        target = torch.zeros_like(values)
        bcp.save(tmp_path / place, states(leaf))
        bcp.load(tmp_path / place, states(target))
        assert same_bits(target, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    target = torch.zeros_like(values)
    bcp.save(tmp_path / "0", {"model": values.view(dtype)})
    bcp.load(tmp_path / "0", {"model": target.view(dtype)})
    assert torch.equal(target, values)
