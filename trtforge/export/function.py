"""The user's own function as the source of a model; in the child process only.

It returns `(module, example_inputs)`, or an object with those two as attributes. `example_inputs` is a tuple of tensors
or a dict of them by argument name. Such an object may also have `dynamic_shapes` (per input the names of its open axes,
`{"x": {0: "batch", 2: "height"}}`), `input_names` and `output_names`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.errors import InputError
from trtforge.export.torch_model import BATCH, Dims, Flat, ModelInput, TorchModel, merge_layout, resize
from trtforge.user_code import USER_ERRORS, load_function

_CONTRACT = "return (module, example_inputs), example_inputs being a tuple of tensors or a dict of them"


def load_from_function(name: str, layout: Mapping[str, Dims] | None) -> TorchModel:
    """Call the function and make its model ready to be traced.

    Args:
        name: `package.module:function`.
        layout: the dims of each input that the profile file gives; they win over the function's own.

    Raises:
        InputError: the function failed or returned something else.
    """
    function = load_function(name, "model")
    try:
        result = function()
    except USER_ERRORS as err:
        raise InputError(
            f"model {name!r} cannot be made", f"it failed with {type(err).__name__}: {err}", "correct the function"
        ) from err
    module, examples, extras = _unpack(result, name)
    module = module.eval().to("cpu")
    keywords, tensors = _as_tensors(examples, name)
    names = _input_names(extras.get("input_names"), keywords, module, len(tensors), name)
    dims = _dims(names, tensors, extras.get("dynamic_shapes"), layout, name)
    flat = Flat(module, keywords)
    inputs = [ModelInput(own, own_dims) for own, own_dims in zip(names, dims, strict=True)]
    original: dict[str, int] = {}
    for item, tensor in zip(inputs, tensors, strict=True):
        original |= {dim: size for dim, size in zip(item.dims, tensor.shape, strict=True) if isinstance(dim, str)}
    sizes = {dim: max(2, size) for dim, size in original.items()}

    def sample(shapes: Mapping[str, tuple[int, ...]], seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            tensor if seed == 0 and tuple(tensor.shape) == shapes[own] else resize(tensor, shapes[own], generator)
            for own, tensor in zip(names, tensors, strict=True)
        )

    try:
        found = flat.names_of_outputs(*tensors)
    except USER_ERRORS as err:
        raise InputError(
            f"model {name!r} does not run on its own example inputs", f"{type(err).__name__}: {err}", _CONTRACT
        ) from err
    return TorchModel(
        module=flat,
        inputs=inputs,
        sample=sample,
        sizes=sizes,
        other_sizes=other_sizes(sizes),
        fixed_sizes=original,
        output_names=_output_names(extras.get("output_names"), found, name),
        architecture=type(module).__name__,
    )


def other_sizes(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes to try for a second run: batch 1, and what is likely to divide where the example's sizes divide."""
    others = [name for name in sizes if name != BATCH]
    small = {name: max(2, sizes[name] // 2) for name in others}
    large = {name: 2 * sizes[name] for name in others}
    batch = {BATCH: 1} if BATCH in sizes else {}
    candidates = [small | batch, large | batch, {name: sizes[name] for name in others} | batch]
    return [candidate for candidate in candidates if candidate and candidate != dict(sizes)]


def _unpack(result: Any, name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    extras: dict[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2:
        module, examples = result
    elif not isinstance(result, nn.Module) and hasattr(result, "module") and hasattr(result, "example_inputs"):
        module, examples = result.module, result.example_inputs
        extras = {key: getattr(result, key, None) for key in ("dynamic_shapes", "input_names", "output_names")}
    else:
        hint = " without example inputs" if isinstance(result, nn.Module) else ""
        raise InputError(f"model {name!r} cannot be used", f"it returned a {type(result).__name__}{hint}", _CONTRACT)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"model {name!r} cannot be used", f"its module is a {type(module).__name__}, no torch.nn.Module", _CONTRACT
        )
    return module, examples, extras


def _as_tensors(examples: Any, name: str) -> tuple[list[str] | None, list[Tensor]]:
    """Keyword names, where the example is a dict, and the tensors."""
    if isinstance(examples, Tensor):
        examples = (examples,)
    keywords = None
    if isinstance(examples, Mapping):
        keywords, examples = [str(key) for key in examples], list(examples.values())
    if not isinstance(examples, Sequence) or not examples:
        raise InputError(f"model {name!r} has no example inputs", f"it gave {type(examples).__name__}", _CONTRACT)
    for index, value in enumerate(examples):
        if not isinstance(value, Tensor):
            which = keywords[index] if keywords else index
            raise InputError(
                f"example input {which} of model {name!r} is no tensor",
                f"it is a {type(value).__name__}; an engine takes tensors only",
                "wrap the module in one whose forward takes tensors and fills in the rest",
            )
    return keywords, [value.detach().to("cpu") for value in examples]


def _input_names(given: Any, keywords: list[str] | None, module: nn.Module, count: int, name: str) -> list[str]:
    if given is not None:
        names = [str(entry) for entry in given]
        if len(names) != count or len(set(names)) != count:
            raise InputError(
                f"model {name!r} names {len(names)} inputs", f"it has {count} example inputs", "give each its own name"
            )
        return names
    if keywords is not None:
        return keywords
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in positional]
    return found[:count] if len(found) >= count else [f"input_{index}" for index in range(count)]


def _output_names(given: Any, found: list[str], name: str) -> list[str]:
    if given is None:
        return found
    names = [str(entry) for entry in given]
    if len(names) != len(found) or len(set(names)) != len(names):
        raise InputError(
            f"model {name!r} names {len(names)} outputs", f"it returns {len(found)} tensors", "give each its own name"
        )
    return names


def _dims(
    names: Sequence[str], tensors: Sequence[Tensor], own: Any, layout: Mapping[str, Dims] | None, name: str
) -> list[Dims]:
    """The dims of every input: the profile's, the function's, or an open batch."""
    if own is not None and not isinstance(own, Mapping):
        own = dict(zip(names, own, strict=False))
    if layout is None and own is None:
        return _open_batch(tensors)
    result = []
    for key, tensor in zip(names, tensors, strict=True):
        dims: list[int | str] = list(merge_layout(tuple(tensor.shape), layout, key))
        if own is not None and (layout is None or key not in layout):
            for axis, dim in _axes(own.get(key)).items():
                if not -len(dims) <= axis < len(dims):
                    raise InputError(
                        f"dynamic_shapes of model {name!r} names axis {axis} of input {key!r}",
                        f"the input has {len(dims)} axes",
                        "correct it",
                    )
                dims[axis] = _dim_name(dim, f"{key}_{axis % len(dims)}")
        result.append(tuple(dims))
    return result


def _open_batch(tensors: Sequence[Tensor]) -> list[Dims]:
    """The first axis of every input that has as many rows as the first input."""
    rows = tensors[0].shape[0] if tensors[0].dim() else None
    return [
        (BATCH, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == rows else tuple(tensor.shape)
        for tensor in tensors
    ]


def _axes(entry: Any) -> dict[int, Any]:
    if entry is None:
        return {}
    pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry)
    return {int(axis): dim for axis, dim in pairs if dim is not None and not isinstance(dim, int)}


def _dim_name(dim: Any, default: str) -> str:
    """The name of a dim given as text or as torch.export.Dim; a hint such as Dim.AUTO has none."""
    if isinstance(dim, str):
        return dim
    name = getattr(dim, "__name__", None)
    return name if isinstance(name, str) else default
