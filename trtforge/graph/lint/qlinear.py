"""ONNX Runtime's quantized operators, written as Q/DQ around float operators.

    QLinearOp(x, x_scale, x_zero_point, ..., y_scale, y_zero_point)
        = QuantizeLinear(Op(DequantizeLinear(x, x_scale, x_zero_point), ...), y_scale, y_zero_point)

ONNX Runtime defines them that way and rounds once more inside, so results differ by at most one step of y.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, is_onnx_op
from trtforge.graph.lint.editor import Editor, set_inputs, set_outputs
from trtforge.graph.lint.params import constant_input, has_input, int_attribute
from trtforge.graph.signature import tensor_dtype

MICROSOFT = "com.microsoft"
DYNAMIC_OPS = frozenset(
    [
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "DynamicQuantizeLSTM",
        "MatMulIntegerToFloat",
        "QAttention",
        "QEmbedLayerNormalization",
    ]
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """Where a quantized operator has its inputs.

    Attributes:
        op: the float operator.
        operands: (tensor, scale, zero-point) of each float operand.
        output: (scale, zero-point) of the result.
        bias: the int32 bias, whose scale is the product of the operands'.
        plain: inputs passed on unchanged, in front of the operands.
    """

    op: str
    operands: tuple[tuple[int, int, int], ...]
    output: tuple[int, int]
    bias: int | None = None
    plain: tuple[int, ...] = ()


_ONE, _TWO = ((0, 1, 2),), ((0, 1, 2), (3, 4, 5))
_SIGNATURES = {
    "QLinearConv": _Signature("Conv", _TWO, (6, 7), bias=8),
    "QLinearMatMul": _Signature("MatMul", _TWO, (6, 7)),
    "QGemm": _Signature("Gemm", _TWO, (7, 8), bias=6),
    "QLinearAdd": _Signature("Add", _TWO, (6, 7)),
    "QLinearMul": _Signature("Mul", _TWO, (6, 7)),
    "QLinearSigmoid": _Signature("Sigmoid", _ONE, (3, 4)),
    "QLinearLeakyRelu": _Signature("LeakyRelu", _ONE, (3, 4)),
    "QLinearSoftmax": _Signature("Softmax", _ONE, (3, 4)),
    "QLinearAveragePool": _Signature("AveragePool", _ONE, (3, 4)),
    "QLinearGlobalAveragePool": _Signature("GlobalAveragePool", _ONE, (3, 4)),
    "QLinearWhere": _Signature("Where", ((1, 2, 3), (4, 5, 6)), (7, 8), plain=(0,)),
}


def _signature(node: gs.Node) -> _Signature | None:
    if node.op == "QLinearConcat":
        operands = tuple((index, index + 1, index + 2) for index in range(2, len(node.inputs) - 2, 3))
        return _Signature("Concat", operands, (0, 1))
    return _SIGNATURES.get(node.op)


def is_quantized_operator(node: gs.Node) -> bool:
    """True for ONNX's and ONNX Runtime's operators that compute on codes with fixed scales."""
    is_known_domain = is_onnx_op(node) or node.domain == MICROSOFT
    return is_known_domain and bool(node.op.startswith("QLinear") or node.op == "QGemm")


def reason_to_leave(node: gs.Node) -> str | None:
    """Why a quantized operator cannot be converted; None when it can."""
    signature = _signature(node)
    if signature is None or not signature.operands:
        return "its float form is not known"
    needed = [*signature.plain, *(index for operand in signature.operands for index in operand[:2])]
    if not all(has_input(node, index) for index in needed) or not node.outputs:
        return "it lacks inputs"
    if node.attrs.get("channels_last"):
        return "its layout is channels last"
    if node.op == "QLinearSoftmax" and (int_attribute(node, "opset", 13) or 0) < 13:
        return "it is a Softmax over several axes"
    if not isinstance(node.attrs.get("alpha", 1.0), float):
        return "its alpha is no number"
    parameters = [index for operand in signature.operands for index in operand[1:]] + list(signature.output)
    if any(has_input(node, index) and constant_input(node, index) is None for index in parameters):
        return "its scales or zero-points are not constants"
    if any(_axis_of(node, signature, tensor, scale) == "unknown" for tensor, scale, _ in signature.operands):
        return "the axis of its scales is not known"
    if signature.bias is not None and has_input(node, signature.bias) and constant_input(node, signature.bias) is None:
        return "its bias is not a constant"
    return None if _sizes_fit(node, signature) else "its scales do not fit its weight or bias"


def _sizes_fit(node: gs.Node, signature: _Signature) -> bool:
    """Whether scales per channel have one entry for each channel of the weight and of the bias, and others one."""
    results = [constant_input(node, index) for index in signature.output]
    if any(result is not None and result.size != 1 for result in results):
        return False
    for tensor, scale, zero_point in signature.operands:
        axis = _axis_of(node, signature, tensor, scale)
        values, weight = constant_input(node, scale), constant_input(node, tensor)
        zeros = constant_input(node, zero_point) if has_input(node, zero_point) else None
        assert values is not None
        if values.size == 0 or (zeros is not None and zeros.size not in (1, values.size)):
            return False
        if isinstance(axis, int):
            assert weight is not None
            bias = constant_input(node, signature.bias) if signature.bias is not None else None
            if not 0 <= axis < weight.ndim or weight.shape[axis] != values.size:
                return False
            if bias is not None and (bias.ndim == 0 or bias.shape[-1] not in (1, values.size)):
                return False
    return True


def _axis_of(node: gs.Node, signature: _Signature, tensor: int, scale: int) -> int | str | None:
    """The axis of an operand's scales; None for one scale, "unknown" where it cannot be told."""
    values = constant_input(node, scale)
    if values is None or values.size == 1:
        return None
    weight = constant_input(node, tensor)
    if weight is None or values.ndim != 1 or tensor != 3:
        return "unknown"
    if signature.op == "Conv":
        return 0
    if signature.op == "Gemm":
        return 0 if node.attrs.get("transB") else 1
    return weight.ndim - 1 if signature.op == "MatMul" else "unknown"


def convert_qlinear(editor: Editor) -> None:
    """Step: quantized operators become Q/DQ around float operators."""
    for holder in all_graphs(editor.graph):
        converter = _Converter(editor)
        for node in holder.nodes:
            if is_quantized_operator(node) and reason_to_leave(node) is None:
                converter.convert(node)
    editor.apply()


class _Converter:
    """Converts the operators of one graph; operands that several share are dequantized once."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._dequantized: dict[tuple[int, ...], gs.Variable] = {}

    def convert(self, node: gs.Node) -> None:
        signature = _signature(node)
        assert signature is not None
        old_op = node.op
        inputs = [node.inputs[index] for index in signature.plain]
        inputs += [self._dequantize(node, signature, operand) for operand in signature.operands]
        if signature.bias is not None and has_input(node, signature.bias):
            inputs.append(self._bias(node, signature))
        (result,) = node.outputs[:1]
        if has_input(node, signature.output[0]):
            floats = self._editor.variable(f"{result.name}_float", np.float32, result.shape)
            self._quantize(node, signature, floats, result)
            set_outputs(node, [floats])
        set_inputs(node, inputs)
        node.op, node.domain = signature.op, None
        for attribute in ("channels_last", "opset"):
            node.attrs.pop(attribute, None)
        self._editor.record("qlinear-op", [node], f"{old_op} became {node.op} with Q/DQ; within one step of its output")

    def _dequantize(self, node: gs.Node, signature: _Signature, operand: tuple[int, int, int]) -> gs.Variable:
        index, scale, zero_point = operand
        tensor = node.inputs[index]
        axis = _axis_of(node, signature, index, scale)
        dtype = tensor_dtype(tensor.dtype) or np.dtype(np.uint8)
        scale_tensor = self._scalar_or_vector(node.inputs[scale], axis)
        zero = (
            self._scalar_or_vector(node.inputs[zero_point], axis, scale_tensor.values.shape)
            if has_input(node, zero_point)
            else self._editor.constant(f"{tensor.name}_zero_point", np.zeros(scale_tensor.values.shape), dtype)
        )
        key = (id(tensor), id(node.inputs[scale]), id(node.inputs[zero_point]) if has_input(node, zero_point) else 0)
        if key not in self._dequantized:
            output = self._editor.variable(f"{tensor.name}_dequantized", np.float32, tensor.shape)
            attrs = {} if axis is None else {"axis": axis}
            added = self._editor.node(
                "DequantizeLinear", f"{node.name}_DequantizeLinear", [tensor, scale_tensor, zero], [output], **attrs
            )
            self._editor.before(node, added)
            self._dequantized[key] = output
        return self._dequantized[key]

    def _quantize(self, node: gs.Node, signature: _Signature, floats: gs.Variable, result: gs.Tensor) -> None:
        scale = self._scalar_or_vector(node.inputs[signature.output[0]], None)
        if has_input(node, signature.output[1]):
            zero = self._scalar_or_vector(node.inputs[signature.output[1]], None)
        else:
            dtype = tensor_dtype(result.dtype) or tensor_dtype(node.inputs[signature.operands[0][0]].dtype) or np.uint8
            zero = self._editor.constant(f"{result.name}_zero_point", 0, dtype)
        name = f"{node.name}_QuantizeLinear"
        self._editor.after(node, self._editor.node("QuantizeLinear", name, [floats, scale, zero], [result]))

    def _scalar_or_vector(self, tensor: gs.Constant, axis: Any, shape: tuple[int, ...] | None = None) -> gs.Constant:
        """A parameter without needless axes, or one zero-point for each of several scales."""
        values = tensor.values
        wanted = shape if shape is not None else (() if axis is None else values.shape)
        if values.shape == wanted:
            return tensor
        filled = np.broadcast_to(values.reshape(-1), wanted) if wanted else values.reshape(())
        return self._editor.constant(tensor.name, filled, values.dtype)

    def _bias(self, node: gs.Node, signature: _Signature) -> gs.Constant:
        """The int32 bias as float32: its scale is the product of the operands'."""
        assert signature.bias is not None
        bias = node.inputs[signature.bias]
        scales = [node.inputs[scale].values.astype(np.float32) for _, scale, _ in signature.operands]
        first, second = (scale.reshape(-1) for scale in scales)
        factor = np.float32(node.attrs.get("alpha", 1.0)) * first * second
        values = bias.values.astype(np.float32) * (factor if factor.size > 1 else factor.reshape(()))
        return self._editor.constant(f"{bias.name}_float", values, np.float32)
