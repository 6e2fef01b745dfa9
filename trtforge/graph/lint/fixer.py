"""Mend what the rules find, as far as the numbers stay within one quantization step.

The steps build on each other: first everything becomes Q/DQ, then Q/DQ becomes pairs, then the pairs become symmetric
int8 with one scale per activation and one per output channel of a weight. What needs data (a scale of 0 for an
activation, dynamic quantization) or would change numbers further (two different pairs in a row) is left.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from trtforge.graph.edit import sort_nodes
from trtforge.graph.fold import fold_constants
from trtforge.graph.lint.activations import make_symmetric, match_scale_types, mend_negative_scales, spell_out
from trtforge.graph.lint.editor import Editor
from trtforge.graph.lint.findings import Fixed
from trtforge.graph.lint.operators import convert_microsoft_qdq
from trtforge.graph.lint.pairs import (
    agree_pairs,
    collapse_double_pairs,
    merge_duplicates,
    move_layout_ops,
    write_zero_points,
)
from trtforge.graph.lint.qlinear import convert_qlinear
from trtforge.graph.lint.tables import dequantize_tables
from trtforge.graph.lint.weights import requantize_weights, store_dequantized, store_quantized


def _move_layout_ops(editor: Editor) -> None:
    # Codes that were just stored may stand in front of a Transpose or Reshape.
    fold_constants(editor.graph)
    move_layout_ops(editor)


# One round does nearly all; a scale that itself was stored as codes takes a second one.
_MAX_ROUNDS = 4
_STEPS: tuple[Callable[[Editor], None], ...] = (
    convert_microsoft_qdq,
    convert_qlinear,
    write_zero_points,
    mend_negative_scales,
    store_quantized,
    dequantize_tables,
    _move_layout_ops,
    dequantize_tables,
    store_dequantized,
    agree_pairs,
    collapse_double_pairs,
    merge_duplicates,
    mend_negative_scales,
    spell_out,
    make_symmetric,
    requantize_weights,
    match_scale_types,
)


def fix(graph: gs.Graph) -> list[Fixed]:
    """Mend every finding that can be mended safely, subgraphs included.

    Outputs stay within one quantization step of the tensors concerned, computed as written. A second call finds nothing
    to do.

    Args:
        graph: normalised (`graph.normalise`), of opset 13 or newer; modified in place.

    Returns:
        What was done, in order.
    """
    editor = Editor(graph)
    for _ in range(_MAX_ROUNDS):
        num_fixed = len(editor.fixed)
        for step in _STEPS:
            step(editor)
        if len(editor.fixed) == num_fixed:
            break
    if editor.fixed:
        sort_nodes(graph)
    return editor.fixed
