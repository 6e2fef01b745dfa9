"""Models that arrive with Q/DQ, from quantization-aware training or from another tool.

What is there stays as it is, scales untouched; what is missing is added:

    activation  weight      what is done
    Q/DQ        Q/DQ        nothing
    Q/DQ        float       the weight becomes int8, with scales of its own
    float       Q/DQ        the activation gets a pair by calibration, or reads a pair that another node has
    float       float       as in a float model

A weight counts as quantized when it is an int8 initializer behind DequantizeLinear or a float one behind a pair. Layout
operators and MaxPool may stand between a DequantizeLinear and its reader: they pass quantized values on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.errors import InputError
from trtforge.graph.edit import InputEdits, sort_nodes
from trtforge.graph.names import UniqueNames
from trtforge.graph.signature import tensor_dtype
from trtforge.quantization.formats import smallest_scale
from trtforge.quantization.sites import KeptQuantized, ReusedSite

_TRANSPARENT_OPS = frozenset(("Cast", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
# Layout operators in a row: two or three are common, more than a dozen is no exporter's work.
_MAX_STEPS = 16
_MAX_SHOWN = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The DequantizeLinear nodes behind a node's first two inputs; None for an operand that is float."""

    first: gs.Node | None
    second: gs.Node | None

    @property
    def is_float(self) -> bool:
        """True for a node that no Q/DQ reaches."""
        return self.first is None and self.second is None

    @property
    def is_complete(self) -> bool:
        """True where both operands are quantized."""
        return self.first is not None and self.second is not None

    @property
    def other_dtype(self) -> str | None:
        """The type of an operand that is quantized to something other than int8, or None."""
        for node in (self.first, self.second):
            dtype = None if node is None else tensor_dtype(node.inputs[0].dtype)
            if node is not None and dtype != np.dtype(np.int8):
                return "an unknown type" if dtype is None else dtype.name
        return None


def operands_of(node: gs.Node) -> Operands:
    """The Q/DQ in front of a node of two operands."""
    first, second = (_dequantizer(tensor) for tensor in node.inputs[:2])
    return Operands(first, second)


def _dequantizer(tensor: gs.Tensor) -> gs.Node | None:
    for _ in range(_MAX_STEPS):
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is None or producer.op == "DequantizeLinear":
            return producer
        if producer.op not in _TRANSPARENT_OPS or not producer.inputs:
            return None
        tensor = producer.inputs[0]
    return None


def find_pairs(graph: gs.Graph) -> dict[str, str]:
    """The int8 pairs with one scale that a model came with: quantized tensor -> output of its DequantizeLinear."""
    pairs: dict[str, str] = {}
    for node in graph.nodes:
        if (
            node.op != "QuantizeLinear"
            or isinstance(node.inputs[0], gs.Constant)
            or not isinstance(node.inputs[1], gs.Constant)
        ):
            continue
        is_int8 = tensor_dtype(node.outputs[0].dtype) == np.dtype(np.int8)
        dequantizers = [reader for reader in node.outputs[0].outputs if reader.op == "DequantizeLinear"]
        if dequantizers and is_int8 and node.inputs[1].values.size == 1:
            pairs.setdefault(node.inputs[0].name, dequantizers[0].outputs[0].name)
    return pairs


def connect_reused(graph: gs.Graph, sites: Sequence[ReusedSite], nodes: Collection[str]) -> None:
    """Let inputs read the pairs that are there already; in place.

    Args:
        graph: after `insert_qdq`.
        sites: of the placement.
        nodes: those that were quantized in the end (`QdqReport.nodes`).
    """
    wanted = {(site.node, site.input_index): site.dequantized for site in sites if site.node in nodes}
    if not wanted:
        return
    tensors = {tensor.name: tensor for node in graph.nodes for tensor in node.outputs}
    edits = InputEdits()
    for node in graph.nodes:
        for index in range(len(node.inputs)):
            if (node.name, index) in wanted:
                edits.replace(node, index, tensors[wanted[node.name, index]])
    edits.apply()
    sort_nodes(graph)


def raise_small_scales(graph: gs.Graph, dtype: np.dtype[np.generic]) -> tuple[str, ...]:
    """Raise the scales of weights that are below the smallest normal number of a type to it, in place.

    A dead channel's scale (torch writes 1.2e-7) has no float16, and a weight whose scales stay float32 for that does
    not build beside an activation in float16. Codes are rounded to the new scale; those of a dead channel are 0.

    Args:
        graph: with float32 scales.
        dtype: the type that the scales will have.

    Returns:
        The names of the Q/DQ nodes that changed.
    """
    smallest = np.float32(smallest_scale(dtype))
    names, edits, changed = UniqueNames(graph), InputEdits(), []
    for node in graph.nodes:
        if node.op not in ("DequantizeLinear", "QuantizeLinear") or not _is_weight(node):
            continue
        scales = node.inputs[1].values
        if scales.ndim > 1 or not np.any((scales > 0) & (scales < smallest)):
            continue
        axis = node.attrs.get("axis", 1)
        codes = node.inputs[0].values if node.op == "DequantizeLinear" and not node.inputs[0].inputs else None
        if codes is not None and scales.ndim and not -codes.ndim <= axis < codes.ndim:
            continue  # scales along no axis of the codes, which lint refuses
        raised = np.maximum(scales, smallest)
        edits.replace(node, 1, gs.Constant(names.tensor(f"{node.name}_scales"), raised))
        if codes is not None:
            ratios = scales / raised
            if scales.ndim:
                ratios = ratios.reshape([-1 if index == axis % codes.ndim else 1 for index in range(codes.ndim)])
            rounded = np.rint(codes * ratios).astype(codes.dtype)
            edits.replace(node, 0, gs.Constant(names.tensor(f"{node.name}_codes"), rounded))
        changed.append(node.name)
    edits.apply()
    return tuple(changed)


def _is_weight(node: gs.Node) -> bool:
    """True for Q or DQ of a constant with constant float32 scales; a DQ may follow the Q of a float constant."""
    if not isinstance(node.inputs[1], gs.Constant) or node.inputs[1].values.dtype != np.float32:
        return False
    source = node.inputs[0]
    if node.op == "DequantizeLinear" and source.inputs and source.inputs[0].op == "QuantizeLinear":
        source = source.inputs[0].inputs[0]
    return isinstance(source, gs.Constant)


def everything_quantized(kept: Sequence[KeptQuantized]) -> InputError:
    """The error of a model in which nothing is left to quantize."""
    names = ", ".join(entry.node for entry in kept[:_MAX_SHOWN]) + (", ..." if len(kept) > _MAX_SHOWN else "")
    return InputError(
        "every layer of this model that could be quantized came with Q/DQ",
        f"there is nothing left to calibrate: {names}",
        "build it with --fp16, --bf16 or --fp32, which keep its Q/DQ and run these layers in INT8",
    )
