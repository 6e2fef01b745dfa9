"""A dynamically quantized model with unsigned weights: the same numbers, and integer products that no CPU cuts off.

x86 processors without VNNI multiply unsigned activations by signed weights in pairs and add each pair into 16 bits,
which saturate (vpmaddubsw: 2 x 255 x 127 = 64770 becomes 32767). ONNX Runtime's kernels for signed weights do that;
those for unsigned weights widen first and are exact. 128 added to codes and zero-point changes no product:

    (w + 128) - (z + 128) = w - z
"""

from __future__ import annotations

import io
import mmap
from pathlib import Path

import numpy as np
import onnx

from trtforge.graph.wire import WEIGHT_BYTES, WireError, split_model, write_model

# Operator -> its weights as (index of the codes, index of the zero-point).
_WEIGHTS = {
    "ConvInteger": ((1, 3),),
    "DynamicQuantizeLSTM": ((1, 9), (2, 11)),
    "DynamicQuantizeMatMul": ((1, 3),),
    "MatMulInteger": ((1, 3),),
    "MatMulIntegerToFloat": ((1, 5),),
    "QAttention": ((1, 7),),
}
# They take codes, which have to be unsigned as well; the other operators quantize their input themselves.
_TAKES_CODES = frozenset(("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QAttention"))
# What protobuf can hold, with room for the new tensors.
_MOST_BYTES = 2**30


def with_unsigned_weights(path: Path) -> bytes | None:
    """The serialised model with unsigned weights; None where none is signed.

    Weights that lie beside the file, that the graph computes, that nodes of subgraphs read, or of models above 1 GiB
    stay as they are.

    Args:
        path: an ONNX file.
    """
    if not 0 < path.stat().st_size <= _MOST_BYTES:
        return None
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        split = split_model(data, WEIGHT_BYTES)
    except WireError:
        return None
    model = onnx.ModelProto.FromString(split.skeleton)
    if not any(node.op_type in _WEIGHTS for node in model.graph.node):
        return None
    weights = {
        name: np.frombuffer(data[span.offset : span.offset + span.num_bytes], np.uint8)
        for name, span in split.weights.items()
    }
    if not _Widener(model.graph, weights).run():
        return None
    stream = io.BytesIO()
    write_model(model, weights, stream)
    return stream.getvalue()


class _Widener:
    """Gives products unsigned copies of their weights and zero-points, in place."""

    def __init__(self, graph: onnx.GraphProto, weights: dict[str, np.ndarray]) -> None:
        self.graph = graph
        self.weights = weights
        self.signed = {
            tensor.name: tensor
            for tensor in graph.initializer
            if tensor.data_type == onnx.TensorProto.INT8 and tensor.data_location != onnx.TensorProto.EXTERNAL
        }
        self.codes = {node.output[0] for node in graph.node if node.op_type == "DynamicQuantizeLinear"}
        self.copies: dict[str, str] = {}
        self.taken = {name for node in graph.node for name in (*node.input, *node.output)}

    def run(self) -> bool:
        """True when there was anything to do."""
        for node in self.graph.node:
            if node.op_type not in _TAKES_CODES or node.input[0] in self.codes:
                for weight, zero_point in _WEIGHTS.get(node.op_type, ()):
                    self._widen(node, weight, zero_point)
        return bool(self.copies)

    def _widen(self, node: onnx.NodeProto, weight: int, zero_point: int) -> None:
        if weight >= len(node.input) or node.input[weight] not in self.signed:
            return
        zeros = node.input[zero_point] if zero_point < len(node.input) else ""
        if zeros and zeros not in self.signed:
            return
        node.input.extend([""] * (zero_point + 1 - len(node.input)))
        node.input[weight] = self._copy(node.input[weight])
        node.input[zero_point] = self._copy(zeros)

    def _copy(self, name: str) -> str:
        """The unsigned copy of a tensor; 128 for a zero-point that is left out."""
        if name not in self.copies:
            copy = self._new_name(f"{name}_unsigned")
            if name in self.weights:
                tensor = self.graph.initializer.add(name=copy, data_type=onnx.TensorProto.UINT8)
                tensor.dims.extend(self.signed[name].dims)
                self.weights[copy] = self.weights[name] ^ 0x80
            else:
                values = onnx.numpy_helper.to_array(self.signed[name]) if name else np.zeros((), np.int8)
                self.graph.initializer.append(onnx.numpy_helper.from_array(values.view(np.uint8) ^ 0x80, copy))
            self.copies[name] = copy
        return self.copies[name]

    def _new_name(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name
