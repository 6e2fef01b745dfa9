"""Step of the fixer for stored codes that no product reads: embeddings as ONNX Runtime writes them.

Codes of one asymmetric scale rarely fit int8 once their zero-point is taken off. In front of a product they are
quantized again, because INT8 is what the product is to run in; elsewhere that would only cost accuracy.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array, is_onnx_op
from trtforge.graph.lint.editor import Editor
from trtforge.graph.lint.params import INT8, UINT8, producer_of, read_params
from trtforge.graph.lint.weights import shift, wanted_axes

CODES = (INT8, UINT8)


def dequantize_tables(editor: Editor) -> None:
    """Step: asymmetric codes, stored or looked up in stored ones, become floats where no product reads them."""
    tables: dict[tuple[int, int], gs.Constant] = {}
    outputs = editor.output_ids()
    for _, node in editor.nodes("DequantizeLinear"):
        params = read_params(node)
        if params is None or params.axis is not None or params.is_symmetric_int8 or params.dtype not in CODES:
            continue
        rule = "unsigned-zero-point" if params.dtype == UINT8 else "nonzero-zero-point"
        codes, lookup = node.inputs[0], producer_of(node.inputs[0])
        if is_array(codes):
            if id(node.outputs[0]) in outputs or wanted_axes(node, codes.values.ndim) or shift(codes.values, params):
                continue
            node.outputs[0].to_constant(params.dequantize(codes.values).astype(params.scale.dtype))
            editor.record(rule, [node], f"stored as {params.scale.dtype}; same numbers")
        elif lookup is not None and lookup.op == "Gather" and is_onnx_op(lookup) and is_array(lookup.inputs[0]):
            table = lookup.inputs[0]
            key = (id(table), id(node.inputs[1]))
            if key not in tables:
                values = params.dequantize(table.values)
                tables[key] = editor.constant(f"{table.name}_float", values, params.scale.dtype)
            inputs = [tables[key], lookup.inputs[1]]
            again = editor.node("Gather", f"{lookup.name}_float", inputs, [node.outputs[0]], **lookup.attrs)
            editor.before(node, again)
            editor.record(rule, [node], f"the table that it reads is stored as {params.scale.dtype}; same numbers")
        else:
            continue
        editor.remove(node)
    editor.apply()
