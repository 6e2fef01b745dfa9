"""A block as an ONNX model of one sequence length: as the plugin's operator, or in standard operators.

The standard form is what trtforge lowers to without the plugin: one packed product for q, k and v, and `Attention`-23.
Weights are constants, as in a model that is deployed; x is the one input, [B, S, H] in T, and y the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtforge.benchmark.arrays import Host, bits_from_values
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.operands import EPSILON, Operands, softmax_scale
from trtforge.ops.attention_ffn import DOMAIN, OPSET, VERSION, Variant, attributes_of, inputs_of

_IR_VERSION = 11


def variant_of(case: BlockCase) -> Variant:
    """The operator that computes the case."""
    return Variant(case.order, case.activation, case.mask == "causal", case.dtype == "int8", case.mask == "lengths")


def plugin_model(case: BlockCase, operands: Operands) -> onnx.ModelProto:
    """One node of the plugin's operator, without its body: an executor that lacks the plugin fails, and does not
    measure something else.
    """
    variant = variant_of(case)
    known: dict[str, Any] = {
        "num_heads": case.num_heads,
        "softmax_scale": softmax_scale(case),
        "epsilon": EPSILON,
        **{f"{role}_input_scale": scale for role, scale in operands.input_scales.items()},
    }
    inputs = [given.name for given in inputs_of(variant)]
    node = helper.make_node(variant.op_type, inputs, ["y"], domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(a.name, known[a.name]) for a in attributes_of(variant))
    constants = [_constant(name, operands.values[name], case) for name in inputs if name != "x"]
    return _model(case, [node], constants)


def standard_model(case: BlockCase, operands: Operands) -> onnx.ModelProto:
    """The block in standard operators."""
    return _StandardBlock(case, operands).model()


def _model(case: BlockCase, nodes: list[Any], constants: list[Any]) -> onnx.ModelProto:
    shape = [case.batch, case.sequence, case.width]
    port = _element_type(case)
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", port, shape)],
        [helper.make_tensor_value_info("y", port, shape)],
        constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)


def _element_type(case: BlockCase) -> int:
    return int(TensorProto.BFLOAT16 if case.element_type == "bf16" else TensorProto.FLOAT16)


def _constant(name: str, values: Host, case: BlockCase) -> Any:
    """Values in T; codes, lengths and scales in their own type."""
    if values.dtype != np.float32 or name.endswith("_scale"):
        kind = int(helper.np_dtype_to_tensor_dtype(values.dtype))
        return helper.make_tensor(name, kind, values.shape, values.tobytes(), raw=True)
    bits = bits_from_values(values, case.element_type)
    return helper.make_tensor(name, _element_type(case), values.shape, bits.tobytes(), raw=True)


class _StandardBlock:
    """Nodes and constants of one model as they are added."""

    def __init__(self, case: BlockCase, operands: Operands) -> None:
        self.case = case
        self.operands = operands
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def model(self) -> onnx.ModelProto:
        if self.case.order == "pre":
            h = self._add("Add", ["x", self._attention(self._norm("x", "ln1"))])
            y = self._add("Add", [h, self._ffn(self._norm(h, "ln2"))])
        else:
            h = self._norm(self._add("Add", ["x", self._attention("x")]), "ln1")
            y = self._norm(self._add("Add", [h, self._ffn(h)]), "ln2")
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        return _model(self.case, self.nodes, self.constants)

    def _add(self, op: str, inputs: list[str], **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def _hold(self, name: str, values: Host) -> str:
        self.constants.append(_constant(name, values, self.case))
        return name

    def _norm(self, x: str, name: str) -> str:
        parts = [self._hold(f"{name}_{part}", self.operands.values[f"{name}_{part}"]) for part in ("gamma", "beta")]
        return self._add("LayerNormalization", [x, *parts], axis=-1, epsilon=EPSILON)

    def _linear(self, x: str, role: str) -> str:
        values = self.operands.values
        weight = self._hold(f"w_{role}", values[f"w_{role}"])
        if self.case.dtype == "int8":
            scale = self._scale(f"{role}_input_scale", np.float32(self.operands.input_scales[role]))
            zero = self._hold(f"{role}_zero", np.zeros((), np.int8))
            x = self._add("DequantizeLinear", [self._add("QuantizeLinear", [x, scale, zero]), scale, zero])
            column_scales = self._scale(f"w_{role}_scales", values[f"w_{role}_scale"])
            rows = self._add("DequantizeLinear", [weight, column_scales], axis=0)
            weight = self._add("Transpose", [rows], perm=[1, 0])
        product = self._add("MatMul", [x, weight])
        return self._add("Add", [product, self._hold(f"b_{role}", values[f"b_{role}"])])

    def _scale(self, name: str, values: Any) -> str:
        """A scale in T, whose name does not make it float32."""
        return self._hold(f"{name}_in_t", np.asarray(values, np.float32))

    def _attention(self, x: str) -> str:
        case = self.case
        shape = self._hold("packed_shape", np.array([0, 0, 3, case.num_heads, case.head_size], np.int64))
        packed = self._add("Reshape", [self._linear(x, "qkv"), shape])
        parts = self._add("Transpose", [packed], perm=[2, 0, 3, 1, 4])
        q_k_v = [self._add("Gather", [parts, self._hold(f"part_{i}", np.array(i, np.int64))], axis=0) for i in range(3)]
        attributes: dict[str, Any] = {"scale": softmax_scale(case), "is_causal": int(case.mask == "causal")}
        heads = self._add("Attention", [*q_k_v, *self._mask()], **attributes)
        rows = self._add("Transpose", [heads], perm=[0, 2, 1, 3])
        merged = self._add("Reshape", [rows, self._hold("merged_shape", np.array([0, 0, -1], np.int64))])
        return self._linear(merged, "out")

    def _mask(self) -> list[str]:
        case = self.case
        if case.mask == "bias":
            return [self._hold("attention_bias", self.operands.values["attention_bias"])]
        if case.mask == "lengths":
            is_key = np.arange(case.sequence) < np.array(case.lengths)[:, None]
            shape = (case.batch, 1, case.sequence, case.sequence)
            return [self._hold("is_key", np.ascontiguousarray(np.broadcast_to(is_key[:, None, None, :], shape)))]
        return []

    def _ffn(self, x: str) -> str:
        up = self._linear(x, "up")
        if self.case.activation == "silu":
            activated = self._add("Mul", [up, self._add("Sigmoid", [up])])
        elif self.case.activation == "relu":
            activated = self._add("Relu", [up])
        else:
            kind = "tanh" if self.case.activation == "gelu_tanh" else "none"
            activated = self._add("Gelu", [up], approximate=kind)
        return self._linear(activated, "down")
