"""A checked `.pt2` file as a model; in the child process only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtforge.errors import InputError
from trtforge.export.function import other_sizes
from trtforge.export.torch_model import BATCH, Dims, Flat, ModelInput, TorchModel
from trtforge.export.write import input_shapes
from trtforge.user_code import USER_ERRORS


def load_from_program(path: Path, layout: Mapping[str, Dims] | None) -> TorchModel:
    """Load a program that program.py has checked.

    Args:
        path: the `.pt2` file.
        layout: the profile's names for its dims.

    Raises:
        InputError: torch cannot load it.
    """
    # Sample inputs are a pickle, and the one thing that torch still reads through torch.load: they are not needed.
    unpickle, torch.load = torch.load, lambda *_, **__: {}
    try:
        program: Any = torch.export.load(path)
    except USER_ERRORS as err:
        raise InputError(
            f"torch cannot load {path}",
            f"{type(err).__name__}: {' '.join(str(err).split())[:300]}",
            f"save it again with torch.export.save of torch {torch.__version__.partition('+')[0]}",
        ) from err
    finally:
        torch.load = unpickle
    names = list(program.graph_signature.user_inputs)
    shapes = input_shapes(program)
    dtypes = [node.meta["val"].dtype for node in program.graph.nodes if node.name in set(names)]
    dims = _dims(names, shapes, layout)
    inputs = [ModelInput(name, own) for name, own in zip(names, dims, strict=True)]
    sizes: dict[str, int] = {}
    for item, shape in zip(inputs, shapes, strict=True):
        sizes |= {
            dim: max(2, int(size.node.hint or 2) if isinstance(size, torch.SymInt) else int(size))
            for dim, size in zip(item.dims, shape, strict=True)
            if isinstance(dim, str)
        }

    def sample(wanted: Mapping[str, tuple[int, ...]], seed: int) -> tuple[Tensor, ...]:
        """Normal floats; ones for integers and booleans, which are ids or masks of ranges that nothing states."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(wanted[name], generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.ones(wanted[name], dtype=dtype)
            for name, dtype in zip(names, dtypes, strict=True)
        )

    module = Flat(program.module())
    outputs = module.names_of_outputs(*sample({item.name: item.shape(sizes) for item in inputs}, 0))
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
