"""What the weights that a graph stores in a low format take, and what they would take in their float type."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_nodes, is_array
from trtforge.graph.signature import tensor_dtype
from trtforge.manifest import WeightStorage
from trtforge.quantization.formats import FP8, INT4, INT8

_BITS = {INT8.dtype: 8, FP8.dtype: 8, INT4.dtype: 4}
_NAMES = {number_format.dtype: number_format.name for number_format in (INT8, FP8, INT4)}


def weight_storage(graph: gs.Graph) -> dict[str, WeightStorage]:
    """Count and bytes of the constants behind DequantizeLinear, by format; scales included.

    Args:
        graph: as it is built, so that scales and results have their final types.
    """
    found: dict[str, WeightStorage] = {}
    seen: set[int] = set()
    for node in all_nodes(graph):
        if node.op != "DequantizeLinear" or not is_array(node.inputs[0]) or id(node.inputs[0]) in seen:
            continue
        seen.add(id(node.inputs[0]))
        codes, scales = node.inputs[0].values, node.inputs[1]
        if codes.dtype not in _BITS:
            continue
        width = (tensor_dtype(node.outputs[0].dtype) or np.dtype(np.float32)).itemsize
        num_bytes = codes.size * _BITS[codes.dtype] // 8 + (scales.values.nbytes if is_array(scales) else 0)
        known = found.get(_NAMES[codes.dtype], WeightStorage(count=0, bytes=0, float_bytes=0))
        found[_NAMES[codes.dtype]] = WeightStorage(
            count=known.count + 1,
            bytes=known.bytes + num_bytes,
            float_bytes=known.float_bytes + codes.size * width,
        )
    return dict(sorted(found.items()))
