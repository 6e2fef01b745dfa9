"""Mend what torch's ONNX exporter writes against the operators' definitions; in the child process only."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir


def repair_rotary_embeddings(graph: Any) -> None:
    """Give `RotaryEmbedding` a cache per row, in place.

    The operator wants cosines and sines of shape [batch, seq, half head]. The exporter's fusion (onnxscript 0.7) hands
    over those of the model, which are [1, seq, half head] where all rows have the same positions; ONNX Runtime then
    fails at every batch but 1.
    """
    expanded: dict[int, Any] = {}
    for node in list(graph):
        if node.op_type != "RotaryEmbedding" or len(node.inputs) > 3:
            continue
        for index in (1, 2):
            cache = node.inputs[index]
            # What the fusion made has no shape yet; expanding what has all its rows already changes nothing.
            if cache.shape is not None and (len(cache.shape) != 3 or cache.shape[0] != 1):
                continue
            if id(cache) not in expanded:
                expanded[id(cache)] = _expand_rows(graph, node, cache, f"rotary_{len(expanded)}")
            node.replace_input_with(index, expanded[id(cache)])


def _expand_rows(graph: Any, before: Any, cache: Any, name: str) -> Any:
    """The cache with as many rows as the first input of a node, computed in front of that node."""
    rows = onnx_ir.node("Shape", [before.inputs[0]], {"start": 0, "end": 1})
    ones = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(np.ones(2, np.int64))})
    shape = onnx_ir.node("Concat", [rows.outputs[0], ones.outputs[0]], {"axis": 0})
    wide = onnx_ir.node("Expand", [cache, shape.outputs[0]])
    for node, suffix in ((rows, "rows"), (ones, "ones"), (shape, "shape"), (wide, "cache")):
        node.outputs[0].name = f"{name}_{suffix}"
    graph.insert_before(before, [rows, ones, shape, wide])
    return wide.outputs[0]
