"""Operators of ONNX itself that no TensorRT parser takes, or not in every form (tried with TensorRT-RTX 1.7).

An operator whose ONNX definition is itself a function of others is replaced by that function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op
from trtforge.graph.intake import dynamic_int8, scatter, standard_attention
from trtforge.graph.intake.emit import (
    BOOL,
    FLOAT32,
    INT32,
    INT64,
    Emitter,
    constant_values,
    dtype_of,
    front_axis,
    optional_input,
    rank_of,
    static_size,
)
from trtforge.graph.intake.rewrites import RefusedError
from trtforge.graph.passes.dilation import MAX_TAPS, taps
from trtforge.graph.signature import tensor_dtype

Results = Sequence[gs.Tensor | None]
Rule = Callable[[gs.Node, Emitter], Results]

# Elements of a Fourier matrix: 16 MB.
_MAX_FOURIER = 2**22


def layer_norm(node: gs.Node, emit: Emitter) -> Results:
    """LayerNormalization with one output, or its arithmetic where the mean or deviation is read."""
    if not any(emit.is_read(node, index) for index in (1, 2)):
        return [emit("LayerNormalization", *node.inputs, dtype=node.inputs[0].dtype, **node.attrs)]
    x, scale, bias = node.inputs[0], node.inputs[1], optional_input(node, 2)
    dtype, rank = dtype_of(x), rank_of(x)
    axes = emit.ints(*range(front_axis(int(node.attrs.get("axis", -1)), rank), rank))
    wide = emit.cast(x, FLOAT32)
    mean = emit("ReduceMean", wide, axes, dtype=FLOAT32, keepdims=1)
    centred = emit("Sub", wide, mean, dtype=FLOAT32)
    variance = emit("ReduceMean", emit("Mul", centred, centred, dtype=FLOAT32), axes, dtype=FLOAT32, keepdims=1)
    epsilon = emit.constant(node.attrs.get("epsilon", 1e-5), FLOAT32)
    deviation = emit("Sqrt", emit("Add", variance, epsilon, dtype=FLOAT32), dtype=FLOAT32)
    inverse = emit("Reciprocal", deviation, dtype=FLOAT32)
    result: gs.Tensor = emit.cast(emit("Mul", centred, inverse, dtype=FLOAT32), dtype)
    result = emit("Mul", result, scale, dtype=dtype)
    return [result if bias is None else emit("Add", result, bias, dtype=dtype), mean, inverse]


def max_pool(node: gs.Node, emit: Emitter) -> Results:
    """MaxPool without indices, or Max over shifted slices where the window is dilated."""
    if emit.is_read(node, 1):
        raise RefusedError("its indices are read", "export the model without unpooling")
    if all(step == 1 for step in node.attrs.get("dilations", [1])):
        return [emit("MaxPool", node.inputs[0], dtype=node.inputs[0].dtype, **node.attrs)]
    attrs = node.attrs
    kernel, rank = attrs["kernel_shape"], len(attrs["kernel_shape"])
    if attrs.get("auto_pad", "NOTSET") != "NOTSET" or attrs.get("ceil_mode", 0) or int(np.prod(kernel)) > MAX_TAPS:
        raise RefusedError("its dilated window rounds up, pads itself or is large", "export it without dilation")
    x, dtype = node.inputs[0], dtype_of(node.inputs[0])
    strides, dilations = attrs.get("strides", [1] * rank), attrs["dilations"]
    pads = attrs.get("pads", [0] * 2 * rank)
    lowest = np.finfo(dtype).min if dtype.kind == "f" else np.iinfo(dtype).min
    widths = [0, 0, *pads[:rank], 0, 0, *pads[rank:]]
    padded = emit("Pad", x, emit.ints(*widths), emit.constant(lowest, dtype), dtype=dtype) if any(pads) else x
    axes = range(2, 2 + rank)
    shifted = [
        emit("Slice", padded, *(emit.ints(*part) for part in (starts, ends, axes, strides)), dtype=dtype)
        for starts, ends in taps(kernel, dilations)
    ]
    return [shifted[0] if len(shifted) == 1 else emit("Max", *shifted, dtype=dtype)]


def bitwise_not(node: gs.Node, emit: Emitter) -> Results:
    """-1 - x."""
    dtype = dtype_of(node.inputs[0])
    if dtype.kind != "i":
        raise RefusedError("its input is unsigned", "use signed integers")
    return [emit("Sub", emit.constant(-1, dtype), node.inputs[0], dtype=dtype, shape=node.inputs[0].shape)]


def count_up(node: gs.Node, emit: Emitter) -> Results:
    """Range, for the places of the ones in a vector of ones: how exporters write a count."""
    filled = node.inputs[0].inputs[0]
    counted = emit.positions(emit.cast(filled.inputs[0], INT64))
    return [emit("Unsqueeze", counted, emit.ints(0), dtype=INT64, shape=[1, None])]


def _fills_vector_of_ones(node: gs.Node) -> bool:
    maker = node.inputs[0].inputs[0] if node.inputs and node.inputs[0].inputs else None
    if maker is None or maker.op != "ConstantOfShape" or static_size(maker.inputs[0], 0) != 1:
        return False
    value = maker.attrs.get("value")
    return value is not None and bool(np.all(np.asarray(value.values) != 0))


def fourier(node: gs.Node, emit: Emitter) -> Results:
    """MatMuls with the constant matrices of cosines and sines."""
    x, dtype, rank = node.inputs[0], dtype_of(node.inputs[0]), rank_of(node.inputs[0])
    given, axes = constant_values(optional_input(node, 1)), constant_values(optional_input(node, 2))
    if optional_input(node, 2) is not None and axes is None:
        raise RefusedError("its axis is computed at run time", "store the axis as a constant")
    axis = front_axis(int(axes.reshape(())) if axes is not None else int(node.attrs.get("axis", -2)), rank)
    size, parts = static_size(x, axis), static_size(x, rank - 1)
    length = int(given.reshape(())) if given is not None else size
    is_inverse, is_onesided = bool(node.attrs.get("inverse", 0)), bool(node.attrs.get("onesided", 0))
    if length is None or size is None or parts is None or (optional_input(node, 1) is not None and given is None):
        raise RefusedError("the length of its transform is not static", "fix that size in the model")
    if length != size or (is_inverse and is_onesided) or axis == rank - 1:
        raise RefusedError("it cuts, pads or mirrors its signal", "do that in operators of its own")
    num_out = length // 2 + 1 if is_onesided else length
    if length * num_out > _MAX_FOURIER:
        raise RefusedError(f"its length of {length} takes matrices of too many numbers", "transform shorter windows")
    angles = 2 * np.pi * (np.outer(np.arange(length), np.arange(num_out)) % length) / length
    cosines, sines = np.cos(angles), np.sin(angles) * (1 if is_inverse else -1)
    if is_inverse:
        cosines, sines = cosines / length, sines / length
    order = [*(other for other in range(rank - 1) if other != axis), rank - 1, axis]
    turned = emit.transpose(x, *order)
    real = emit.slice(turned, rank - 2, 0, 1)
    matrices = [emit.constant(matrix, dtype) for matrix in (cosines, sines)]
    outputs = [emit("MatMul", real, matrix, dtype=dtype) for matrix in matrices]
    if parts == 2:
        imaginary = emit.slice(turned, rank - 2, 1, 2)
        crossed = [emit("MatMul", imaginary, matrix, dtype=dtype) for matrix in matrices]
        outputs = [
            emit("Sub", outputs[0], crossed[1], dtype=dtype),
            emit("Add", outputs[1], crossed[0], dtype=dtype),
        ]
    joined = emit("Concat", *outputs, dtype=dtype, axis=rank - 2)
    return [emit.transpose(joined, *(order.index(other) for other in range(rank)))]


def affine_grid(node: gs.Node, emit: Emitter) -> Results:
    """MatMul of the constant corners' grid with theta."""
    theta, size = node.inputs[0], constant_values(node.inputs[1])
    dtype = dtype_of(theta)
    if size is None:
        raise RefusedError("the size of its grid is computed at run time", "fix that size in the model")
    sides = [int(side) for side in size[2:]]
    if int(np.prod(sides)) > _MAX_FOURIER:
        raise RefusedError("its grid has too many points", "use a smaller one")
    is_aligned = bool(node.attrs.get("align_corners", 0))
    lines = [np.linspace(-1, 1, side) if is_aligned else (np.arange(side) * 2 + 1) / side - 1 for side in sides]
    # Coordinates come in reverse order of the axes: x, y (, z), then 1.
    planes = np.meshgrid(*lines, indexing="ij")[::-1]
    points = np.stack([*(plane.reshape(-1) for plane in planes), np.ones(int(np.prod(sides)))], axis=1)
    turned = emit.transpose(theta, 0, 2, 1)
    product = emit("MatMul", emit.constant(points, dtype), turned, dtype=dtype)
    return [emit.reshape(product, 0, *sides, len(sides))]


def reduce_bool(node: gs.Node, emit: Emitter) -> Results:
    """The reduction of 0 and 1 as int32."""
    result = emit(node.op, emit.cast(node.inputs[0], INT32), optional_input(node, 1), dtype=INT32, **node.attrs)
    return [emit.cast(result, BOOL)]


def _reduces_bool(node: gs.Node) -> bool:
    return bool(tensor_dtype(node.inputs[0].dtype) == BOOL)


def function_body(node: gs.Node, emit: Emitter) -> Results:
    """The function by which ONNX defines the operator."""
    schema = onnx.defs.get_schema(node.op, emit.opset)
    body = schema.function_body
    tensors: dict[str, gs.Tensor] = dict(zip(body.input, node.inputs, strict=False))
    for inner in body.node:
        attrs = _attributes(inner, node, schema)
        if inner.op_type == "Constant":
            ((name, value),) = attrs.items()
            tensors[inner.output[0]] = emit.constant(*_constant(name, value))
            continue
        inputs = [tensors.get(name) for name in inner.input]
        outputs = emit.many(inner.op_type, inputs, [None] * len(inner.output), **attrs)
        tensors.update(zip(inner.output, outputs, strict=True))
    return [tensors[name] for name in body.output]


def _attributes(inner: onnx.NodeProto, node: gs.Node, schema: onnx.defs.OpSchema) -> dict[str, Any]:
    """A body's node's attributes, with those that refer to the operator's own put in."""
    attrs: dict[str, Any] = {}
    for attribute in inner.attribute:
        source = attribute.ref_attr_name
        value = onnx.helper.get_attribute_value(attribute) if not source else node.attrs.get(source)
        if source and value is None and source in schema.attributes:
            default = schema.attributes[source].default_value
            value = onnx.helper.get_attribute_value(default) if default.type else None
        if isinstance(value, bytes):
            value = value.decode()
        if isinstance(value, onnx.TensorProto) and inner.op_type != "Constant":
            value = gs.Constant("", onnx.numpy_helper.to_array(value))
        attrs[attribute.name] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return attrs


def _constant(name: str, value: Any) -> tuple[Any, Any]:
    if name == "value":
        array = onnx.numpy_helper.to_array(value)
        return array, array.dtype
    return value, np.float32 if name.startswith("value_float") else np.int64


RULES: Mapping[str, Rule] = {
    "AffineGrid": affine_grid,
    "Attention": standard_attention.attention,
    "BitwiseNot": bitwise_not,
    "DFT": fourier,
    "LayerNormalization": layer_norm,
    "MaxPool": max_pool,
    "Mul": dynamic_int8.scaled_product,
    "NonZero": count_up,
    "ReduceMax": reduce_bool,
    "ReduceMin": reduce_bool,
    "SwiGLU": function_body,
    **scatter.RULES,
}
"""By operator of ONNX."""
_WANTED: Mapping[str, Callable[[gs.Node], bool]] = {
    "Attention": standard_attention.is_refused_form,
    "LayerNormalization": lambda node: len(node.outputs) > 1,
    "MaxPool": lambda node: len(node.outputs) > 1 or any(step != 1 for step in node.attrs.get("dilations", [])),
    "Mul": dynamic_int8.is_scale_of_product,
    "NonZero": _fills_vector_of_ones,
    "ReduceMax": _reduces_bool,
    "ReduceMin": _reduces_bool,
    "ScatterND": lambda node: scatter.reduction_of(node) != "none",
    "ScatterElements": lambda node: scatter.reduction_of(node) != "none",
}


def is_wanted(node: gs.Node) -> bool:
    """False for a form of one of ONNX's operators that TensorRT takes."""
    wanted = _WANTED.get(node.op) if is_onnx_op(node) else None
    return wanted is None or wanted(node)
