"""Trace a model with torch.export, and find what keeps a dim from being dynamic; in the child process only."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch

from trtforge.errors import InputError
from trtforge.export.torch_model import TorchModel
from trtforge.export_info import FixedDim

# torch says so of a dim that was to stay open; `xs` is the parameter of Flat.forward and _Head.forward.
_SPECIALISED = re.compile(r"L\['xs'\]\[(\d+)\]\.size\(\)\[(\d+)\].*?specialized it to be a constant \((\d+)\)")
# Files of torch and of this package, whose frames say nothing of the user's model.
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def trace(model: TorchModel) -> tuple[Any, list[FixedDim]]:
    """The traced program, and the named dims that the model fixes to one size; those become static in `model`.

    Raises:
        InputError: torch.export cannot trace it; names the line of the user's code where it can.
    """
    fixed: list[FixedDim] = []
    while True:
        try:
            return _export(model), fixed
        except Exception as err:
            reasons = {name: _cause(model, size) for name, size in _specialised_dims(err, model).items()}
            reasons = reasons or dict.fromkeys(_enlarged_dims(model), f"at another size it fails: {_summary(err)}")
            if not reasons:
                raise _untraceable(err, model) from err
            fixed += [FixedDim(name=name, size=model.fix(name), reason=reason) for name, reason in reasons.items()]


def _export(model: TorchModel) -> Any:
    inputs, shapes = _arguments(model)
    with torch.no_grad():
        return torch.export.export(model.module, inputs, dynamic_shapes=shapes)


def _arguments(model: TorchModel) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Example inputs, and which of their axes are open."""
    # A hint instead of a torch Dim: torch finds the range, and may find two dims to be equal.
    dims = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(item.dims) if isinstance(dim, str)}
        for item in model.inputs
    )
    return model.inputs_at(model.sizes, 0), (dims,)


def _specialised_dims(err: Exception, model: TorchModel) -> dict[str, int]:
    """Named dims that torch found to be constant, with the size that it saw."""
    found = {}
    for index, axis, size in _SPECIALISED.findall(str(err)):
        dim = model.inputs[int(index)].dims[int(axis)]
        if isinstance(dim, str):
            found[dim] = int(size)
    return found


def _enlarged_dims(model: TorchModel) -> list[str]:
    """Named dims of size 1 in the user's example, which was made larger for the trace: it may not run that way."""
    return [name for name, size in model.sizes.items() if model.fixed_sizes.get(name, size) != size]


def _cause(model: TorchModel, size: int) -> str:
    """The line that compared the open size with a constant, as torch's draft export reports it."""
    inputs, shapes = _arguments(model)
    try:
        with torch.no_grad():
            report = torch.export.draft_export(model.module, inputs, dynamic_shapes=shapes)._report
        failures = [failure.data for failure in report.failures if str(failure.data.get("expr", "")).startswith("Eq(")]
    except Exception:
        # The draft is only for the message, and its report is not part of torch's documented interface.
        failures = []
    for data in failures:
        frames = data.get("user_stack") or []
        if str(data.get("expr")).endswith(f", {size})") and frames:
            frame = frames[-1]
            line = " ".join(str(frame.get("loc", "")).split())
            return f"line {frame.get('line')} in {frame.get('name')}: {line}"
    return "the model's code treats it as a constant"


def _untraceable(err: Exception, model: TorchModel) -> InputError:
    return InputError(
        f"torch.export cannot trace {model.architecture}",
        _summary(err),
        "rewrite what depends on the values of tensors (torch.where, torch.cond), or export the model yourself and "
        "give the .onnx file",
    )


def _summary(err: Exception) -> str:
    text = " ".join(line.strip() for line in str(err).splitlines()[:2]) or type(err).__name__
    place = _user_line(err)
    return f"{text[:300]}{f' (at {place})' if place else ''}"


def _user_line(err: Exception) -> str:
    """The innermost line that is neither torch's nor trtforge's."""
    frames = traceback.extract_tb(err.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_FOREIGN, "<"))]
    return f"{Path(own[-1].filename).name} line {own[-1].lineno}: {own[-1].line}" if own else ""
