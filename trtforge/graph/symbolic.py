"""Concrete shapes of a whole graph, node by node, for concrete input shapes. Runs in native.py's child process.

One inference over the whole graph gives most shapes. Going through the nodes in order, for the rest, everything about
earlier tensors is known: their shapes, and the values of the small
integer tensors that Shape, Gather, Concat and arithmetic compute. Each node's output types then follow from its schema
(onnx's C++ inference for one node, given those values), so that a Reshape whose target is computed from shapes resolves
whatever arithmetic led to it. What a schema cannot tell (subgraphs, ops of other domains) comes from the inference over
the whole graph, with symbolic dims replaced by the inputs' sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, shape_inference

from trtforge.graph.evaluate import EVALUABLE_OPS, count_output_elements, evaluate_node
from trtforge.graph.validate import DEFAULT_DOMAINS

Array = np.ndarray[Any, Any]

# Elements of a tensor whose values are followed: shapes, axes and masks of positions, not activations.
_VALUE_ELEMENTS = 4096


def resolve_shapes(model: onnx.ModelProto, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Concrete shapes by tensor name of the top graph; what cannot be known is missing.

    Args:
        model: types may be missing, weights may have no data; changed in place.
        input_shapes: a concrete shape for each graph input.
    """
    bindings = _bind_inputs(model.graph, input_shapes)
    whole = _infer_whole(model)
    fallback = {info.name: info.type for info in (*model.graph.value_info, *model.graph.output)}
    fallback.update({name: kind for name, kind in whole.items() if kind.tensor_type.HasField("shape")})
    state = _State(model, {name: kind for name, kind in whole.items() if _concrete_shape(kind) is not None})
    for node in model.graph.node:
        state.visit(node)
        for name in node.output:
            if name and state.shapes.get(name) is None and name in fallback:
                state.learn(name, _substitute(fallback[name], bindings))
    return {name: shape for name, shape in state.shapes.items() if shape is not None}


def _infer_whole(model: onnx.ModelProto) -> dict[str, TypeProto]:
    """Types that follow from the sizes of the inputs alone, by one inference over the whole graph."""
    computed = {name for node in model.graph.node if node.domain in DEFAULT_DOMAINS for name in node.output}
    fresh = onnx.ModelProto.FromString(model.SerializeToString())
    del fresh.graph.value_info[:]
    fresh.graph.value_info.extend(info for info in model.graph.value_info if info.name not in computed)
    for port in fresh.graph.output:
        # What an output states may hold for other sizes.
        port.type.tensor_type.ClearField("shape")
    try:
        graph = shape_inference.infer_shapes(fresh).graph
    except Exception:
        # InferenceError, RuntimeError and pybind's types: node by node is then all there is.
        return {}
    return {info.name: info.type for info in (*graph.value_info, *graph.output)}


def _concrete_shape(type_proto: TypeProto) -> tuple[int, ...] | None:
    """The shape that a type states, if it has a size for every dim."""
    tensor_type = type_proto.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor_type.shape.dim)
    return sizes if min(sizes, default=0) >= 0 else None


def _bind_inputs(graph: onnx.GraphProto, input_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Write the sizes into the graph's inputs; gives those symbolic names that mean one size everywhere."""
    bindings: dict[str, int] = {}
    ambiguous: set[str] = set()
    for port in graph.input:
        if port.name not in input_shapes:
            continue
        shape = port.type.tensor_type.shape
        for dim, size in zip(shape.dim, input_shapes[port.name], strict=False):
            if dim.dim_param and bindings.setdefault(dim.dim_param, size) != size:
                ambiguous.add(dim.dim_param)
        port.type.CopyFrom(helper.make_tensor_type_proto(port.type.tensor_type.elem_type, input_shapes[port.name]))
    return {name: size for name, size in bindings.items() if name not in ambiguous}


def _substitute(type_proto: TypeProto, bindings: Mapping[str, int]) -> TypeProto:
    result = TypeProto()
    result.CopyFrom(type_proto)
    for dim in result.tensor_type.shape.dim:
        if dim.dim_param in bindings:
            dim.dim_value = bindings[dim.dim_param]
    return result


class _State:
    """What is known of the tensors so far, by name: types, concrete shapes (None: not known), and small values."""

    def __init__(self, model: onnx.ModelProto, known: Mapping[str, TypeProto]) -> None:
        self.types: dict[str, TypeProto] = {}
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        self.values: dict[str, Array] = {}
        self._known = known
        self._imports = list(model.opset_import)
        self._versions = {entry.domain: entry.version for entry in model.opset_import}
        self._ir_version = model.ir_version
        for port in model.graph.input:
            self.learn(port.name, port.type)
        for tensor in model.graph.initializer:
            self.learn(tensor.name, helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
            self._remember(tensor)

    def learn(self, name: str, type_proto: TypeProto) -> None:
        """Note a tensor's type in place of what was known."""
        self.types[name] = type_proto
        self.shapes[name] = _concrete_shape(type_proto)

    def _remember(self, tensor: TensorProto) -> None:
        num_elements = math.prod(tensor.dims)
        if num_elements <= _VALUE_ELEMENTS and (tensor.HasField("raw_data") or num_elements == 0):
            self.values[tensor.name] = numpy_helper.to_array(tensor)

    def visit(self, node: onnx.NodeProto) -> None:
        """Learn the types, and where possible the values, of a node's outputs."""
        if node.domain in DEFAULT_DOMAINS:
            self._infer(node)
            self._evaluate(node)

    def _infer(self, node: onnx.NodeProto) -> None:
        results = [name for name in node.output if name]
        if all(name in self._known for name in results):
            for name in results:
                self.learn(name, self._known[name])
            return
        given = [name for name in node.input if name]
        if any(name not in self.types for name in given):
            return
        data = {name: numpy_helper.from_array(self.values[name], name) for name in given if name in self.values}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._versions.get("", 1), "")
            inferred = shape_inference.infer_node_outputs(
                schema,
                node,
                {name: self.types[name] for name in given},
                data,
                opset_imports=self._imports,
                ir_version=self._ir_version,
            )
        except Exception:
            # SchemaError, InferenceError, RuntimeError: an op that onnx cannot infer.
            return
        for name, type_proto in inferred.items():
            self.learn(name, type_proto)

    def _evaluate(self, node: onnx.NodeProto) -> None:
        first_shape = self.shapes.get(node.input[0]) if node.input else None
        if node.op_type in ("Shape", "Size") and first_shape is not None:
            # The op looks only at the shape: a stand-in without memory has it.
            inputs: list[Array | None] = [np.broadcast_to(np.float32(0), first_shape)]
        elif node.op_type in EVALUABLE_OPS and all(name in self.values for name in node.input if name):
            inputs = [self.values.get(name) for name in node.input]
        else:
            return
        try:
            is_small = node.op_type in ("Shape", "Size") or count_output_elements(node, inputs) <= _VALUE_ELEMENTS
            outputs = evaluate_node(node, inputs, self._versions.get("", 1)) if is_small else []
        except Exception:
            # The reference implementation raises anything on inputs that do not fit; the value stays unknown.
            return
        for name, output in zip([name for name in node.output if name], outputs, strict=False):
            self.values[name] = output
            self.learn(
                name,
                helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(output.dtype), output.shape),
            )
