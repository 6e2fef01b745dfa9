"""Fold what the profiles decide.

A dim with one size in all profiles becomes static, an integer input with one value a constant, and the ranges of the
other dims decide comparisons (`batch == 1` where every profile has 2 or more). What follows becomes constant: shapes,
conditions, trip counts, axes, sizes of Split, Resize and Reshape. The graph is then that of the profiles: sizes outside
them may give wrong results, where the engine refuses them.

Inputs keep their names, order and types, and their declared dims where those are open. A name that stands for dims of
different ranges ("?", or one that an exporter gave twice) is taken off those dims: builders take one name for one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.bounds import KnownSizes, Span
from trtforge.graph.collection import without_collection
from trtforge.graph.control_flow.sequences import SEQUENCE_OPS
from trtforge.graph.edit import all_nodes, replace_uses
from trtforge.graph.names import Names, UniqueNames, false_dim_names, is_dim_name
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import simplification_notes
from trtforge.graph.save import skeleton_from_graph
from trtforge.graph.simplify import simplify, write_types
from trtforge.profile import Profile, ProfileSet

_OPEN_OPS = SEQUENCE_OPS | {"If", "Loop", "Scan", "Squeeze"}


@without_collection()
def specialise(graph: gs.Graph, profiles: ProfileSet, native: OnnxNative) -> tuple[str, ...]:
    """Fold what the profiles decide, in place.

    Args:
        graph: a normalised graph.
        profiles: with a range for every input that has open dims.
        native: infers types.

    Returns:
        Sentences for the user on what the profiles decided.

    Raises:
        InternalError: the number of Q/DQ nodes changed.
    """
    dropped = _drop_false_names(graph, profiles)
    dims = _Dims(graph, profiles)
    fixed_values, values = _fix_values(graph, profiles)
    has_fixed = dims.fix()
    is_open = any(node.op in _OPEN_OPS for node in all_nodes(graph))
    notes = [
        f"dims named {name!r} have different ranges: the name was dropped" for name in dropped if is_dim_name(name)
    ]
    notes += [f"input {name!r} has one value in all profiles and became a constant" for name in fixed_values]
    if has_fixed or fixed_values or dropped or is_open:
        write_types(graph, native.infer(skeleton_from_graph(graph).model))
        notes += simplification_notes(simplify(graph, native, KnownSizes(dims.ranges, values)))
    dims.restore()
    return tuple(notes)


def _spans(profiles: Sequence[Profile], name: str, axis: int) -> set[tuple[int, int, int]]:
    """min, opt and max of one dim in each profile that has it."""
    ranges = [profile.inputs[name] for profile in profiles if name in profile.inputs]
    return {(r.min[axis], r.opt[axis], r.max[axis]) for r in ranges if axis < len(r.min)}


def _drop_false_names(graph: gs.Graph, profiles: ProfileSet) -> tuple[str, ...]:
    """Take names off inputs' dims that are none, or that dims of different ranges share."""
    places: dict[str, list[tuple[str, int]]] = {}
    for tensor in graph.inputs:
        for axis, dim in enumerate(tensor.shape or ()):
            if isinstance(dim, str):
                places.setdefault(dim, []).append((tensor.name, axis))
    ranges = [{name: (r.min, r.opt, r.max) for name, r in profile.inputs.items()} for profile in profiles.profiles]
    dropped = false_dim_names(places, ranges)
    for tensor in graph.inputs if dropped else ():
        if tensor.shape is not None:
            tensor.shape = [None if dim in dropped else dim for dim in tensor.shape]
    return dropped


class _Dims:
    """The dims of the inputs while the graph is specialised: each open one has a name and a range."""

    def __init__(self, graph: gs.Graph, profiles: ProfileSet) -> None:
        self._graph = graph
        self._profiles = profiles.profiles
        self._declared = {tensor.name: tensor.shape for tensor in graph.inputs}
        self.ranges: dict[str, tuple[int, int]] = {}

    def fix(self) -> bool:
        """Write fixed sizes into the inputs, and a name for every other open dim; whether a size was fixed."""
        names = Names({dim for tensor in self._graph.inputs for dim in tensor.shape or () if isinstance(dim, str)})
        has_fixed = False
        for tensor in self._graph.inputs:
            if not isinstance(tensor, gs.Variable) or tensor.shape is None:
                continue
            shape: list[Any] = []
            for axis, dim in enumerate(tensor.shape):
                spans = _spans(self._profiles, tensor.name, axis)
                if (isinstance(dim, int) and dim >= 0) or not spans:
                    shape.append(dim)
                    continue
                low, high = min(span[0] for span in spans), max(span[2] for span in spans)
                if low == high:
                    has_fixed = True
                    shape.append(low)
                    continue
                name = dim if isinstance(dim, str) and dim else names.claim(f"{tensor.name}_{axis}")
                self.ranges[name] = (low, high)
                shape.append(name)
            tensor.shape = shape
        return has_fixed

    def restore(self) -> None:
        """Take the names off again that only this pass gave."""
        for tensor in self._graph.inputs:
            declared = self._declared[tensor.name]
            if declared is not None:
                tensor.shape = [
                    known if isinstance(known, int) else dim for known, dim in zip(tensor.shape, declared, strict=True)
                ]


def _fix_values(graph: gs.Graph, profiles: ProfileSet) -> tuple[tuple[str, ...], dict[str, Span]]:
    """Make integer inputs with one value in all profiles constants; gives them, and the ranges of the others."""
    inputs = {tensor.name: tensor for tensor in graph.inputs if isinstance(tensor, gs.Variable)}
    fixed: list[str] = []
    ranges: dict[str, Span] = {}
    names = UniqueNames(graph) if any(profile.values for profile in profiles.profiles) else None
    for name in profiles.first.values:
        tensor = inputs.get(name)
        spans = [profile.values[name] for profile in profiles.profiles if name in profile.values]
        if tensor is None or tensor.shape is None or names is None or len(spans) != len(profiles.profiles):
            continue
        low = np.min([span.min for span in spans], axis=0)
        high = np.max([span.max for span in spans], axis=0)
        shape = (len(low),) if len(tensor.shape) == 1 else ()
        if np.array_equal(low, high):
            value = low.reshape(shape).astype(np.dtype(tensor.dtype))
            replace_uses(tensor, gs.Constant(names.tensor(f"{name}_value"), value))
            fixed.append(name)
        else:
            ranges[name] = (low.reshape(shape).astype(np.float64), high.reshape(shape).astype(np.float64))
    return tuple(fixed), ranges
