"""What native.py's child answers about input shapes: what the graph says of them, and whether it takes given ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from trtforge.frames import Arrays, Meta
from trtforge.graph.dims.find import analyse_dims
from trtforge.graph.dims.probe import Conflict, ShapeProbe


@dataclasses.dataclass(frozen=True, slots=True)
class PointResult:
    """What came of one set of input shapes.

    Attributes:
        conflict: the first node that cannot take them, or None.
        peak_bytes: what a run takes, as far as shapes are known; see `ShapeProbe.peak_bytes`.
    """

    conflict: Conflict | None
    peak_bytes: int


def result_from_meta(meta: Mapping[str, Any]) -> PointResult:
    """The result that the child sent."""
    found = meta["conflict"]
    if found is not None:
        sizes = found["sizes"]
        found = Conflict(
            int(found["index"]),
            str(found["node"]),
            str(found["op"]),
            str(found["why"]),
            None if sizes is None else (int(sizes[0]), int(sizes[1])),
        )
    return PointResult(found, int(meta["peak_bytes"]))


def _analyse_dims(meta: Meta, arrays: Arrays, report_progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    report_progress({"phase": "examining the dimensions"})
    model = onnx.ModelProto.FromString(arrays["model"].tobytes())
    return analyse_dims(model, find_limits=bool(meta["find_limits"])).to_json(), {}


def _probe_shapes(meta: Meta, arrays: Arrays, report_progress: Callable[[Meta], None]) -> tuple[Meta, Arrays]:
    report_progress({"phase": "trying the profile's shapes"})
    model = onnx.ModelProto.FromString(arrays["model"].tobytes())
    dtypes = {port.name: port.type.tensor_type.elem_type for port in model.graph.input}
    probe = ShapeProbe(model)
    results = []
    for point in meta["points"]:
        shapes = {name: tuple(shape) for name, shape in point["shapes"].items()}
        values = {
            name: np.array(value, onnx.helper.tensor_dtype_to_np_dtype(dtypes[name])).reshape(shapes[name])
            for name, value in point["values"].items()
            if name in shapes and math.prod(shapes[name]) == len(value)
        }
        conflict = probe.run(shapes, values)
        described = None if conflict is None else dataclasses.asdict(conflict)
        results.append({"conflict": described, "peak_bytes": probe.peak_bytes()})
    return {"results": results}, {}


DIM_SERVICE = {"analyse_dims": _analyse_dims, "probe_shapes": _probe_shapes}
