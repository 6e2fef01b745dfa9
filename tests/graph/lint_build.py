"""Build graphs with TensorRT-RTX in the linter's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_graphsurgeon as gs

from trtforge.backends.base import BuildRequest
from trtforge.backends.plan import EnginePlan
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.graph.save import save_model
from trtforge.graph.signature import input_specs
from trtforge.isolation import Child
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.target import rtx_target_from_option

BATCH = 8
RtxBuild = Callable[[gs.Graph], EnginePlan]


def build(graph: gs.Graph, folder: Path, worker: Child) -> EnginePlan:
    """The plan of a graph; open sizes are `BATCH`."""
    save_model(graph, folder / "model.onnx")
    shapes = {s.name: tuple(d if isinstance(d, int) else BATCH for d in s.shape or ()) for s in input_specs(graph)}
    profile = Profile("p", {name: ShapeRange(shape, shape, shape) for name, shape in shapes.items()})
    target = rtx_target_from_option("sm_86")
    request = BuildRequest(folder / "model.onnx", folder / "engine", ProfileSet((profile,), "file"), target)
    return BACKEND.build(request, worker).plan
