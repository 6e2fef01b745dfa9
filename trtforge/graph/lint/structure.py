"""What TensorRT wants of Q/DQ pairs: where they stand, and that both ends agree."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, is_array, is_onnx_op
from trtforge.graph.lint.findings import Finding
from trtforge.graph.lint.pairs import MOVING_OPS, duplicate_key, quantizer_of, stored_nodes
from trtforge.graph.lint.params import RANGES, has_input, producer_of, quantized_dtype, read_params
from trtforge.graph.lint.qlinear import DYNAMIC_OPS, is_quantized_operator
from trtforge.graph.lint.rules import qdq_nodes


def layout_between_qdq(graph: gs.Graph) -> Iterator[Finding]:
    """Nothing that moves data stands between a Q and its DQ."""
    quantized = {id(tensor) for node in qdq_nodes(graph, "QuantizeLinear") for tensor in node.outputs}
    moving = list(qdq_nodes(graph, *MOVING_OPS, "Concat"))
    stored = stored_nodes(moving)
    for node in moving:
        is_stored = id(node) in stored
        if not is_stored and id(node.inputs[0]) not in quantized:
            continue
        quantized.update(id(tensor) for tensor in node.outputs)
        # TensorRT-RTX refuses stored codes that anything but DequantizeLinear reads, a Pad's value included.
        is_refused = is_stored or (node.op == "Pad" and has_input(node, 2))
        yield Finding(
            "layout-between-qdq",
            node.name,
            f"{node.op} {node.name!r} stands between {'stored codes' if is_stored else 'QuantizeLinear'} "
            "and DequantizeLinear",
            "TensorRT takes stored codes only right in front of DequantizeLinear"
            if is_refused
            else "the pair is then not fused into the layer that follows",
            f"move the {node.op} {'behind the DequantizeLinear' if is_stored else 'in front of the QuantizeLinear'}, "
            "as trtforge lint --fix does",
            "error" if is_refused else "warning",
        )


def unequal_pair(graph: gs.Graph) -> Iterator[Finding]:
    """A DequantizeLinear has the parameters of its QuantizeLinear."""
    for node in qdq_nodes(graph, "DequantizeLinear"):
        source = quantizer_of(node.inputs[0])
        given, wanted = (None if source is None else read_params(source)), read_params(node)
        if source is None or given is None or wanted is None or given.dtype != wanted.dtype:
            continue
        if not given.is_valid or not wanted.is_valid:
            continue
        # A scale rounded to half precision on one side alone is the same scale.
        has_one_type = given.scale.dtype == wanted.scale.dtype
        if not given.is_same_as(wanted, 0.0 if has_one_type else given.rounding):
            yield Finding(
                "unequal-pair",
                node.name,
                f"DequantizeLinear {node.name!r} has other parameters than QuantizeLinear {source.name!r}",
                "a builder that fuses the pair may use either",
                "give both the same, and multiply by the ratio, as trtforge lint --fix does",
                "warning",
            )


def double_qdq(graph: gs.Graph) -> Iterator[Finding]:
    """A tensor is quantized once, not twice in a row."""
    for node in qdq_nodes(graph, "QuantizeLinear"):
        before = producer_of(node.inputs[0])
        if before is None or before.op != "DequantizeLinear" or not is_onnx_op(before):
            continue
        first, second = read_params(before), read_params(node)
        is_same = first is not None and second is not None and first.is_same_as(second)
        yield Finding(
            "double-qdq",
            node.name,
            f"QuantizeLinear {node.name!r} quantizes what DequantizeLinear {before.name!r} just gave",
            "it does nothing" if is_same else "rounding twice costs accuracy and a kernel",
            "drop the second pair, as trtforge lint --fix does"
            if is_same
            else "keep one of the two pairs: calibrate the tensor once",
            "warning",
        )


def duplicate_quantize(graph: gs.Graph) -> Iterator[Finding]:
    """One QuantizeLinear serves all readers of a tensor."""
    for holder in all_graphs(graph):
        first: dict[tuple[object, ...], gs.Node] = {}
        for node in holder.nodes:
            key = duplicate_key(holder, node) if node.op == "QuantizeLinear" and is_onnx_op(node) else None
            if key is not None and first.setdefault(key, node) is not node:
                yield Finding(
                    "duplicate-quantize",
                    node.name,
                    f"QuantizeLinear {node.name!r} does what {first[key].name!r} does",
                    "one per reader can keep GEMMs that share an input from merging",
                    f"let its readers share {first[key].name!r}, as trtforge lint --fix does",
                    "warning",
                )


def lone_quantize(graph: gs.Graph) -> Iterator[Finding]:
    """What QuantizeLinear gives is read by DequantizeLinear."""
    outputs = {id(tensor) for holder in all_graphs(graph) for tensor in holder.outputs}
    for node in qdq_nodes(graph, "QuantizeLinear"):
        codes = node.outputs[0]
        others = [reader for reader in codes.outputs if not _has_its_own_rule(reader)]
        if not others and id(codes) not in outputs:
            continue
        reader = f"{others[0].op} {others[0].name!r}" if others else "an output of the graph"
        yield Finding(
            "lone-quantize",
            node.name,
            f"the codes of QuantizeLinear {node.name!r} go to {reader} without DequantizeLinear",
            "TensorRT fuses only whole pairs; read as numbers, codes cost a kernel of their own",
            "dequantize them in front of the reader, if it is not codes that it wants",
            "warning",
        )


def _has_its_own_rule(reader: gs.Node) -> bool:
    """Whether a node that reads codes is right, or another rule speaks of it."""
    is_expected = reader.op in ("DequantizeLinear", "Concat") or reader.op in MOVING_OPS
    return is_expected or is_quantized_operator(reader) or reader.op in DYNAMIC_OPS


def float_weight(graph: gs.Graph) -> Iterator[Finding]:
    """Weights are stored as codes, not as floats behind a QuantizeLinear."""
    for node in qdq_nodes(graph, "QuantizeLinear"):
        if is_array(node.inputs[0]):
            yield Finding(
                "float-weight",
                node.name,
                f"QuantizeLinear {node.name!r} quantizes the stored tensor {node.inputs[0].name!r}",
                "the file is four times as large, and simplifiers may fold the pair back to float",
                "store the codes and keep DequantizeLinear alone, as trtforge lint --fix does"
                if quantized_dtype(node) in RANGES
                else "store the codes and keep DequantizeLinear alone",
                "warning",
            )
