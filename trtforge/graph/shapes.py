"""Concrete shapes of a graph's tensors for concrete input shapes, without running it (symbolic.py has the method)."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.collection import without_collection
from trtforge.graph.native import OnnxNative, open_native
from trtforge.graph.save import skeleton_from_graph


@without_collection()
def infer_shapes_at(
    graph: gs.Graph, input_shapes: Mapping[str, tuple[int, ...]], native: OnnxNative | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of the top graph's tensors, initializers included, when its inputs have the given shapes.

    Args:
        graph: a normalised graph.
        input_shapes: a shape for each input whose shape is not static.
        native: a child process to share with other passes; by default one is started and ended here.

    Returns:
        Shapes by tensor name; a tensor whose shape depends on data or cannot be inferred is missing.

    Raises:
        InputError: a shape for an input that does not exist or of another rank.
        ChildDiedError: the child process that infers crashed.
    """
    ranks = {tensor.name: None if tensor.shape is None else len(tensor.shape) for tensor in graph.inputs}
    for name, shape in input_shapes.items():
        if name not in ranks:
            raise InputError(
                f"the model has no input {name!r}", f"its inputs: {', '.join(ranks)}", "give shapes for these names"
            )
        if ranks[name] not in (None, len(shape)):
            raise InputError(
                f"input {name!r} cannot have the shape {list(shape)}",
                f"it has {ranks[name]} dims",
                "give one size for each",
            )
    with open_native(native) as child:
        return child.resolve_shapes(skeleton_from_graph(graph).model, input_shapes)
