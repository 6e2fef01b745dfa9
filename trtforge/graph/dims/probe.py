"""Try concrete input shapes on a graph: which node cannot take them, and what it cannot make equal.

Unlike symbolic.py, which tells what it can, this refuses: the first node whose inputs do not fit ends the run. Common
operators have rules of their own, which say what two sizes differ; onnx's inference for one node does the rest. Values
of small integer tensors (shapes, positions) are followed, so that a Reshape to a computed shape and a Gather beyond the
end of a position table show. What depends on data is unknown, and unknown fits. Runs in native.py's child process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, TypeProto, helper, numpy_helper, shape_inference

from trtforge.graph.dims.probe_rules import RULES, MisfitError, Rule, Shape
from trtforge.graph.evaluate import EVALUABLE_OPS, count_output_elements, evaluate_node
from trtforge.graph.validate import DEFAULT_DOMAINS

Array = np.ndarray[Any, Any]

# Where a tensor's elements may be; a weight without data has none of these.
_DATA_FIELDS = frozenset(["raw_data", "int32_data", "int64_data", "float_data", "double_data", "uint64_data"])
# Elements of a tensor whose values are followed: position indices up to this length.
_VALUE_ELEMENTS = 16384
# Bytes of an element: of fp32, in which the reference runs.
_ELEMENT_BYTES = 4
# Results of nodes that are kept, so that what does not change between two runs is not computed again.
_MEMORY = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A node that cannot take the sizes that reach it.

    Attributes:
        index: of the node, in graph order.
        node: its name.
        op: its operator.
        why: what does not fit, with the shapes.
        sizes: two sizes that would have to be equal; None where it is not that simple.
    """

    index: int
    node: str
    op: str
    why: str
    sizes: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """A node with what a run asks of it; protobuf's fields are slow to read again and again."""

    node: onnx.NodeProto
    inputs: tuple[str, ...]
    given: tuple[str, ...]
    outputs: tuple[str, ...]
    is_standard: bool
    rule: Rule | None
    is_evaluable: bool


def _step_from_node(node: onnx.NodeProto) -> _Step:
    inputs, is_standard = tuple(node.input), node.domain in DEFAULT_DOMAINS
    given = tuple(name for name in dict.fromkeys(inputs) if name)
    is_evaluable = is_standard and (node.op_type in EVALUABLE_OPS) and bool(given)
    return _Step(node, inputs, given, tuple(node.output), is_standard, RULES.get(node.op_type), is_evaluable)


class ShapeProbe:
    """Runs shapes through one model.

    Args:
        model: with inferred element types; weights may have no data.

    Attributes:
        shapes: what the last run found, by tensor name.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._steps = [_step_from_node(node) for node in model.graph.node]
        self._imports = list(model.opset_import)
        self._opset = next((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), 1)
        self._ir_version = model.ir_version
        self._elem_types: dict[str, int] = {}
        self._static: dict[str, Shape] = {}
        for info in [*model.graph.input, *model.graph.value_info, *model.graph.output]:
            self._elem_types[info.name] = info.type.tensor_type.elem_type
            dims = info.type.tensor_type.shape.dim
            if info.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
                self._static[info.name] = tuple(dim.dim_value for dim in dims)
        self._weights: dict[str, Shape] = {}
        self._weight_values: dict[str, Array] = {}
        for tensor in model.graph.initializer:
            self._elem_types[tensor.name] = tensor.data_type
            self._weights[tensor.name] = tuple(tensor.dims)
            self._remember_values(tensor)
        self._inputs = {port.name for port in model.graph.input} - set(self._weights)
        self._memory: dict[Any, Any] = {}
        self.shapes: dict[str, Shape] = {}
        self._values: dict[str, Array] = {}

    @property
    def num_nodes(self) -> int:
        """Nodes that one run visits."""
        return len(self._steps)

    def inputs_at(self, index: int) -> list[Shape]:
        """The shapes that reached a node in the last run."""
        return [self.shapes.get(name, ()) for name in self._steps[index].given]

    def _remember_values(self, tensor: TensorProto) -> None:
        count = math.prod(tensor.dims)
        has_data = any(field.name in _DATA_FIELDS for field, _ in tensor.ListFields())
        if count <= _VALUE_ELEMENTS and (has_data or count == 0):
            self._weight_values[tensor.name] = numpy_helper.to_array(tensor)

    def run(self, shapes: Mapping[str, Shape], values: Mapping[str, Array] | None = None) -> Conflict | None:
        """The first node that cannot take these shapes; None where all can.

        Args:
            shapes: of the inputs; an input without one is unknown.
            values: of inputs whose values are known.
        """
        self.shapes = {**self._weights, **shapes}
        self._values = {**self._weight_values, **(values or {})}
        for index, step in enumerate(self._steps):
            try:
                self._visit(index, step)
            except MisfitError as err:
                return Conflict(index, step.node.name, step.node.op_type, err.why, err.sizes)
            except (ArithmeticError, LookupError, TypeError, ValueError):
                # Attributes or ranks that the operator does not have: its outputs stay unknown, and others refuse it.
                continue
        return None

    def peak_bytes(self) -> int:
        """What the last run's tensors take at most, in fp32: the weights, and the activations that live together."""
        last_use = {name: index for index, step in enumerate(self._steps) for name in step.given}
        live = {name: math.prod(shape) for name, shape in self.shapes.items() if name in self._inputs}
        peak = total = sum(live.values())
        for index, step in enumerate(self._steps):
            for name in step.outputs:
                live[name] = math.prod(self.shapes.get(name, ()))
                total += live[name]
            peak = max(peak, total)
            for name in {*step.given, *step.outputs}:
                if name in live and last_use.get(name, index) <= index:
                    total -= live.pop(name)
        return _ELEMENT_BYTES * (peak + sum(math.prod(shape) for shape in self._weights.values()))

    def _visit(self, index: int, step: _Step) -> None:
        shapes = self.shapes
        if step.is_standard and all(name in shapes for name in step.given):
            if step.is_evaluable and self._evaluate(index, step):
                return
            outputs = None
            if step.rule is not None:
                inputs = [shapes[name] if name else None for name in step.inputs]
                outputs = step.rule(step.node, inputs, [self._values.get(name) for name in step.inputs])
            if outputs is None:
                outputs = self._infer(index, step)
            for name, shape in zip(step.outputs, outputs, strict=False):
                if name and shape is not None:
                    shapes[name] = shape
        for name in step.outputs:
            if name and name not in shapes and name in self._static:
                shapes[name] = self._static[name]

    def _infer(self, index: int, step: _Step) -> Sequence[Shape | None]:
        """The shapes that onnx infers for one node; none where it does not know the operator.

        Raises:
            MisfitError: it refuses the shapes.
        """
        data = {name: self._values[name] for name in step.given if name in self._values}
        key = (index, *(self.shapes[name] for name in step.given), *((v.shape, v.tobytes()) for v in data.values()))
        if key not in self._memory:
            self._keep(key, self._infer_once(step.node, step.given, data))
        result = self._memory[key]
        if isinstance(result, str):
            raise MisfitError(result)
        return list(result)

    def _infer_once(
        self, node: onnx.NodeProto, given: Sequence[str], data: Mapping[str, Array]
    ) -> list[Shape | None] | str:
        types = {
            name: helper.make_tensor_type_proto(self._elem_types.get(name, 0) or TensorProto.FLOAT, self.shapes[name])
            for name in given
        }
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opset, "")
            tensors = {name: numpy_helper.from_array(value, name) for name, value in data.items()}
            inferred = shape_inference.infer_node_outputs(
                schema, node, types, tensors, opset_imports=self._imports, ir_version=self._ir_version
            )
        except shape_inference.InferenceError as err:
            text = " ".join(str(err).split())
            # Type inference speaks of element types, which no size can mend.
            return text.split("[ShapeInferenceError] ", 1)[1] if "[ShapeInferenceError]" in text else []
        except Exception:
            # SchemaError, RuntimeError and pybind's types: an op that onnx cannot infer.
            return []
        return [_static_shape(inferred.get(name)) for name in node.output]

    def _evaluate(self, index: int, step: _Step) -> bool:
        """Compute a node whose inputs' values are known; whether that gave all of its outputs."""
        if step.node.op_type in ("Shape", "Size"):
            dims = np.array(self.shapes[step.inputs[0]], np.int64)
            attributes = {attribute.name: attribute.i for attribute in step.node.attribute}
            part = dims[attributes.get("start", 0) : attributes.get("end", len(dims))]
            self._set(step.outputs[0], part if step.node.op_type == "Shape" else np.array(dims.prod(), np.int64))
            return True
        if any(name not in self._values for name in step.given):
            return False
        inputs = [self._values[name] if name else None for name in step.inputs]
        key = (index, "values", *((v.shape, v.tobytes()) for v in inputs if v is not None))
        if key not in self._memory:
            self._keep(key, self._evaluate_once(step.node, inputs))
        outputs = self._memory[key]
        for name, output in zip([name for name in step.outputs if name], outputs, strict=False):
            self._set(name, output)
        return bool(outputs)

    def _evaluate_once(self, node: onnx.NodeProto, inputs: Sequence[Array | None]) -> list[Array]:
        try:
            is_small = count_output_elements(node, inputs) <= _VALUE_ELEMENTS
            return evaluate_node(node, inputs, self._opset) if is_small else []
        except Exception:
            # The reference implementation raises anything on inputs that do not fit; the rules say what.
            return []

    def _set(self, name: str, value: Array) -> None:
        self.shapes[name] = value.shape
        if value.size <= _VALUE_ELEMENTS:
            self._values[name] = value

    def _keep(self, key: Any, result: Any) -> None:
        if len(self._memory) >= _MEMORY:
            self._memory.clear()
        self._memory[key] = result


def _static_shape(type_proto: TypeProto | None) -> Shape | None:
    if type_proto is None or not type_proto.tensor_type.HasField("shape"):
        return None
    dims = type_proto.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None
