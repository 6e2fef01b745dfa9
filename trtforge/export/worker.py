"""The child process that runs torch: it loads a source, traces it, writes the ONNX file and runs the original."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.errors import InputError, missing_extra
from trtforge.isolation import Arrays, Handler, Meta, Progress

# What the two models are compared on: sizes by dim, and the seed of the values.
_runs: list[tuple[dict[str, int], int]] = []
# The same, with one dim of size 1 each.
_ones: dict[str, tuple[dict[str, int], int]] = {}
_model: Any = None


def _handle_export(meta: Meta, _: Arrays, report: Progress) -> tuple[Meta, Arrays]:
    """Export once; `run` then gives inputs and outputs of the original."""
    global _model  # noqa: PLW0603 - the child's one model lives from call to call
    report({"phase": "starting torch"})
    try:
        import onnxscript  # noqa: F401 - torch.onnx needs it, and its own error does not say how to get it
        import torch
    except ImportError as err:
        raise missing_extra(str(err.name), "export") from err
    from trtforge.export.trace import trace
    from trtforge.export.write import dim_ranges, write_onnx

    torch.manual_seed(0)
    report({"phase": "loading the model"})
    _model = _load(meta)
    _model.fit(meta["ranges"])
    if _model.program is None:
        report({"phase": "tracing"})
    program, fixed = (_model.program, []) if _model.program is not None else trace(_model)
    report({"phase": f"converting to opset {meta['opset']}"})
    dims = dim_ranges(_model, program)
    write_onnx(_model, program, Path(meta["output"]), meta["opset"])
    _choose_runs(dims)
    _choose_parities(dims, meta["ranges"])
    _choose_ones(dims)
    return {
        "architecture": _model.architecture,
        "dims": {name: entry.model_dump() for name, entry in dims.items()},
        "fixed": [entry.model_dump() for entry in fixed],
        "notes": _model.notes,
        "exporter": _versions(meta["kind"]),
        "runs": len(_runs),
        "ones": list(_ones),
    }, {}


def _load(meta: Meta) -> Any:
    layout: Mapping[str, tuple[int | str, ...]] | None = (
        None if meta["layout"] is None else {name: tuple(dims) for name, dims in meta["layout"].items()}
    )
    if meta["kind"] == "function":
        from trtforge.export.function import load_from_function

        return load_from_function(meta["source"], layout)
    if meta["kind"] == "program":
        from trtforge.export.load_program import load_from_program

        return load_from_program(Path(meta["source"]), layout)
    from trtforge.export.huggingface import load_from_folder

    return load_from_folder(
        Path(meta["folder"]),
        meta["architecture"],
        pooling=meta["pooling"],
        trust_remote_code=meta["trust_remote_code"],
        layout=layout,
        input_names=meta["input_names"],
    )


def _choose_runs(dims: Mapping[str, Any]) -> None:
    """The example's sizes, and the first other sizes that the original runs at; where there are none, other values."""
    _runs[:] = [(_model.sizes, 0)]
    for sizes in _model.other_sizes:
        wanted = {name: sizes.get(name, _model.sizes[name]) for name in _model.sizes}
        bounded = all(
            (name not in dims or dims[name].max is None or size <= dims[name].max) for name, size in wanted.items()
        )
        if bounded and wanted != _model.sizes and _add_run(wanted):
            return
    _runs.append((_model.sizes, 1))


def _choose_parities(dims: Mapping[str, Any], ranges: Mapping[str, Any]) -> None:
    """Runs at sizes of the other parity than the trace's, of all dims at once or, where the original does not take
    that, of each alone.

    torch.export follows one way of `if size % 2 == 0` and keeps no word of the other. The size next to an example's is
    also no multiple of what divides the example's, such as a window that a model pads to.
    """
    others = {}
    for name, size in _model.sizes.items():
        low, _, high = ranges.get(name, (2, size, None))
        cap = dims[name].max if name in dims else None
        most = min((bound for bound in (high, cap) if bound is not None), default=None)
        near = size_beside(size, max(2, low, dims[name].min if name in dims else 2), most)
        if near is not None and not any(sizes[name] > 1 and (sizes[name] - size) % 2 for sizes, _ in _runs):
            others[name] = near
    if others and not _add_run(_model.sizes | others) and len(others) > 1:
        for name, size in others.items():
            _add_run(_model.sizes | {name: size})


def _add_run(sizes: dict[str, int]) -> bool:
    """Add a run at these sizes, where the original runs at them."""
    with contextlib.suppress(Exception):
        _model.run(_model.inputs_at(sizes, 1))
        _runs.append((sizes, 1))
        return True
    return False


def size_beside(size: int, low: int, high: int | None) -> int | None:
    """The size next to one, within bounds; None where they leave none."""
    return next((near for near in (size + 1, size - 1) if low <= near and (high is None or near <= high)), None)


def _choose_ones(dims: Mapping[str, Any]) -> None:
    """Runs with a dim of size 1, for each that may have it, that the original takes it for, and no run has yet."""
    for name in _model.sizes:
        if name not in dims or dims[name].min > 1 or any(sizes[name] == 1 for sizes, _ in _runs):
            continue
        sizes = {**_model.sizes, name: 1}
        with contextlib.suppress(Exception):
            _model.run(_model.inputs_at(sizes, 1))
            _ones[name] = (sizes, 1)


def _versions(kind: str) -> str:
    import torch

    text = f"torch {torch.__version__}"
    if kind == "folder":
        import transformers

        text += f", transformers {transformers.__version__}"
    return text


def _handle_run(meta: Meta, _: Arrays, __: Progress) -> tuple[Meta, Arrays]:
    """Inputs and outputs of one run, as `in:NAME` and `out:NAME`."""
    sizes, seed = (list(_ones.values()) if meta["kind"] == "one" else _runs)[meta["index"]]
    inputs = _model.inputs_at(sizes, seed)
    try:
        outputs = _model.run(inputs)
    except Exception as err:
        raise InputError(
            f"{_model.architecture} fails in torch", f"{type(err).__name__}: {err}", "correct the model"
        ) from err
    arrays = {f"in:{item.name}": _as_array(value) for item, value in zip(_model.inputs, inputs, strict=True)}
    return {}, arrays | {
        f"out:{name}": _as_array(value) for name, value in zip(_model.output_names, outputs, strict=True)
    }


def _as_array(value: Any) -> Any:
    """A tensor as a numpy array, bfloat16 included."""
    import torch

    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.detach().contiguous().numpy()


SERVICE: dict[str, Handler] = {"export": _handle_export, "run": _handle_run}
