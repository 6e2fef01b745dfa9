"""What a graph says of its inputs' open dimensions, asked of the child process (find.py has the method)."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.edit import copy_graph
from trtforge.graph.native import OnnxNative, open_native
from trtforge.graph.normalise import normalise
from trtforge.graph.save import skeleton_from_graph
from trtforge.profile import DimReport


def report_dims(graph: gs.Graph, *, find_limits: bool = True, native: OnnxNative | None = None) -> DimReport:
    """What is equal, fixed, stepped, bounded or free among the open dimensions of a graph's inputs.

    Args:
        graph: from `load_model`; it is not changed.
        find_limits: vary every dimension to find its limits; otherwise only what sizes have to go together is found.
        native: a child process to share with other passes; by default one is started and ended here.

    Raises:
        InputError: the graph cannot be normalised.
        ChildDiedError: the child process crashed.
    """
    with open_native(native) as child:
        normalised, _ = normalise(copy_graph(graph), native=child)
        return dims_of_normalised(normalised, child, find_limits=find_limits)


def dims_of_normalised(graph: gs.Graph, native: OnnxNative, *, find_limits: bool = True) -> DimReport:
    """The same of a graph that is normalised already."""
    return native.analyse_dims(skeleton_from_graph(graph).model, find_limits)
