"""A checked `.pt2` file as a model; in the child process only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trtforge.errors import InputError
from trtforge.export.function import other_sizes
from trtforge.export.torch_model import BATCH, Dims, Flat, ModelInput, TorchModel, reason_of
from trtforge.export.write import input_shapes
from trtforge.user_code import USER_ERRORS


class _Called(nn.Module):
    """A program called with its tensors by position, however it was called when it was traced."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.module = program.module()
        self._spec = program.call_spec.in_spec

    def forward(self, *xs: Tensor) -> Any:
        """Call the program."""
        args, keywords = pytree.tree_unflatten(xs, self._spec)
        return self.module(*args, **keywords)


def load_from_program(path: Path, layout: Mapping[str, Dims] | None) -> TorchModel:
    """Load a program that program.py has checked.

    Args:
        path: the `.pt2` file.
        layout: the profile's names for its dims.

    Raises:
        InputError: torch cannot load it, it takes more than tensors, or it does not run.
    """
    program = _load(path)
    names, dtypes = _tensor_inputs(program, path)
    shapes = input_shapes(program)
    dims = _dims(names, shapes, layout)
    inputs = [ModelInput(name, own) for name, own in zip(names, dims, strict=True)]
    sizes = _sizes(inputs, shapes)

    def sample(wanted: Mapping[str, tuple[int, ...]], seed: int) -> tuple[Tensor, ...]:
        """Normal floats; ones for integers and booleans, which are ids or masks of ranges that nothing states."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(wanted[name], generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.ones(wanted[name], dtype=dtype)
            for name, dtype in zip(names, dtypes, strict=True)
        )

    module = Flat(_Called(program))
    shapes_at = {item.name: item.shape(sizes) for item in inputs}
    try:
        outputs = module.names_of_outputs(*sample(shapes_at, 0))
    except InputError:
        raise
    except USER_ERRORS as err:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes_at.items())
        raise InputError(
            f"the program {path} does not run on {listed}",
            reason_of(err),
            "wrap the model in package.module:function with example inputs",
        ) from err
    notes = ["its sample inputs were not read; integer inputs were compared on ones"]
    return TorchModel(
        module=module,
        inputs=inputs,
        sample=sample,
        sizes=sizes,
        other_sizes=other_sizes(sizes),
        fixed_sizes={},
        output_names=outputs,
        architecture="the torch.export program",
        program=program,
        notes=notes if any(not dtype.is_floating_point for dtype in dtypes) else [],
    )


def _load(path: Path) -> Any:
    # Sample inputs are a pickle, and the one thing that torch still reads through torch.load: they are not needed.
    unpickle, torch.load = torch.load, lambda *_, **__: {}
    try:
        return torch.export.load(path)
    except USER_ERRORS as err:
        raise InputError(
            f"torch cannot load {path}",
            reason_of(err),
            f"save it again with torch.export.save of torch {torch.__version__.partition('+')[0]}",
        ) from err
    finally:
        torch.load = unpickle


def _tensor_inputs(program: Any, path: Path) -> tuple[list[str], list[torch.dtype]]:
    """Names and types of the inputs.

    Raises:
        InputError: one is no tensor.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = list(program.graph_signature.user_inputs)
    for index, name in enumerate(names):
        is_text = isinstance(name, str)  # as a constant's value may be, by chance one that a tensor has for its name
        if not is_text or not isinstance(values.get(name), Tensor) or names.index(name) < index:
            raise InputError(
                f"input {index} of the program {path} is no tensor",
                f"it was traced with {name!r}; an engine takes tensors only",
                "trace a module whose forward takes tensors and fills in the rest",
            )
    return names, [values[name].dtype for name in names]


def _dims(names: list[str], shapes: list[tuple[Any, ...]], layout: Mapping[str, Dims] | None) -> list[Dims]:
    """A name for every symbol of the program: the profile's, `batch` for the first axis, else input and axis."""
    known: dict[str, str] = {}
    result = []
    for name, shape in zip(names, shapes, strict=True):
        given = (layout or {}).get(name, ())
        own: list[int | str] = []
        for axis, size in enumerate(shape):
            if not isinstance(size, torch.SymInt):
                own.append(int(size))
                continue
            wanted = given[axis] if axis < len(given) else None
            fallback = BATCH if axis == 0 else f"{name}_{axis}"
            own.append(known.setdefault(str(size), wanted if isinstance(wanted, str) else fallback))
        result.append(tuple(own))
    return result


def _sizes(inputs: list[ModelInput], shapes: list[tuple[Any, ...]]) -> dict[str, int]:
    """The size that every open dim was traced with, 2 at least."""
    return {
        dim: max(2, int(size.node.hint or 2) if isinstance(size, torch.SymInt) else int(size))
        for item, shape in zip(inputs, shapes, strict=True)
        for dim, size in zip(item.dims, shape, strict=True)
        if isinstance(dim, str)
    }
