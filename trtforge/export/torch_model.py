"""A PyTorch model with what an export has to know of it; in the child process only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trtforge.errors import InputError

Sampler = Callable[[Mapping[str, tuple[int, ...]], int], tuple[Tensor, ...]]
# A dim that is known by its size, or by a name when it is to stay open.
Dims = tuple[int | str, ...]

BATCH = "batch"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInput:
    """One input: its name, and what its dims are to be in the ONNX model."""

    name: str
    dims: Dims

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape at given sizes of the named dims."""
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)


@dataclasses.dataclass(slots=True)
class TorchModel:
    """A model ready to be traced.

    Attributes:
        module: takes the inputs by position and returns a tuple of tensors.
        inputs: in order.
        sample: inputs of given shapes by input name, the same for the same seed.
        sizes: size of every named dim in the example; at least 2, because torch takes 1 for a constant.
        other_sizes: sizes for a second run, in order of preference.
        fixed_sizes: size of a named dim where it cannot stay open.
        output_names: one per output; None numbers them.
        architecture: class of the model.
        caps: the largest size of a named dim, where a table of positions has it and tracing does not see it.
        program: where the model came traced.
        notes: what the user should know.
    """

    module: nn.Module
    inputs: list[ModelInput]
    sample: Sampler
    sizes: dict[str, int]
    other_sizes: list[dict[str, int]]
    fixed_sizes: dict[str, int]
    output_names: list[str] | None
    architecture: str
    caps: dict[str, int] = dataclasses.field(default_factory=dict)
    program: Any = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def inputs_at(self, sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
        """Seeded inputs at given sizes."""
        return self.sample({item.name: item.shape(sizes) for item in self.inputs}, seed)

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of the PyTorch model."""
        with torch.inference_mode():
            outputs: tuple[Tensor, ...] = self.module(*(value.clone() for value in inputs))
        return outputs

    def fit(self, ranges: Mapping[str, Sequence[int]]) -> None:
        """Move the example's sizes into the ranges that the profile gives; its smallest ones are the second run's."""
        smallest = {}
        for name, size in self.sizes.items():
            if name in ranges:
                low, opt, high = ranges[name]
                self.sizes[name] = max(2, size if low <= size <= high else opt)
                smallest[name] = max(1, low)
        if smallest:
            self.other_sizes.insert(0, self.sizes | smallest)

    def fix(self, name: str) -> int:
        """Give up a named dim; returns the size that it has from now on."""
        size = self.fixed_sizes.get(name, self.sizes[name])
        self.inputs = [
            ModelInput(item.name, tuple(size if dim == name else dim for dim in item.dims)) for item in self.inputs
        ]
        self.sizes = {key: value for key, value in self.sizes.items() if key != name}
        return size


class Flat(nn.Module):
    """A module called with tensors by position, whose output is a flat tuple of tensors.

    Args:
        module: the user's module.
        names: of its keyword arguments; None passes by position.
    """

    def __init__(self, module: nn.Module, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.module = module
        self._names = None if names is None else tuple(names)

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Call the module."""
        if self._names is None:
            result = self.module(*xs)
        else:
            result = self.module(**dict(zip(self._names, xs, strict=True)))
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))

    def names_of_outputs(self, *xs: Tensor) -> list[str]:
        """Names of the outputs: keys of a mapping or fields of a named tuple, else `output`, or `output_0` and on."""
        with torch.inference_mode():
            result = self.module(*xs) if self._names is None else self.module(**dict(zip(self._names, xs, strict=True)))
        found = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if isinstance(leaf, Tensor)]
        if not found:
            raise InputError(
                "the model returns no tensor", f"it returned {type(result).__name__}", "return tensors from forward"
            )
        names = []
        for index, (path, _) in enumerate(found):
            keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
            words = [key for key in keys if isinstance(key, str) and key.isidentifier()]
            names.append("_".join(words) if words else ("output" if len(found) == 1 else f"output_{index}"))
        return names if len(set(names)) == len(names) else [f"output_{index}" for index in range(len(found))]


def merge_layout(own: Dims, layout: Mapping[str, Dims] | None, name: str) -> Dims:
    """The dims that a profile file gives an input, or its own.

    Raises:
        InputError: another number of axes.
    """
    given = own if layout is None else layout.get(name, own)
    if len(given) != len(own):
        raise InputError(
            f"the profile gives input {name!r} {len(given)} dims",
            f"the model takes {len(own)}: [{', '.join(map(str, own))}]",
            "give one entry per axis",
        )
    return given


def reason_of(error: BaseException) -> str:
    """What a failure of torch or of the model says, on one line of 300 characters at most."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def resize(example: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values like an example's in another shape.

    Integers and booleans repeat the example's own values, which are sure to be valid; floats get its mean and spread.
    """
    if example.is_floating_point():
        spread = example.float().std().item() if example.numel() > 1 else 0.0
        noise = torch.randn(tuple(shape), generator=generator) * (spread or 1.0)
        return (noise + example.float().mean().nan_to_num()).to(example.dtype)
    value = example
    for axis, size in enumerate(shape):
        times = -(-size // max(1, value.shape[axis]))
        value = value.repeat([times if i == axis else 1 for i in range(value.dim())]).narrow(axis, 0, size)
    return value.clone()
