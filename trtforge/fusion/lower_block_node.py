"""Transformer blocks as `trtforge::AttentionFFN_*`, which a TensorRT plugin computes.

The graph is the one that is built: quantized, cast, with shapes. Its blocks are matched anew, because quantization
corrects biases and scales channels, and the operator has to get what the graph holds then. Function bodies are attached
here, last: onnx's version converter drops them.

1. A beta that is missing is zeros, a gamma ones; `lower_block_weights` has the rest.
2. Int8 codes are transposed to [columns, K]; scales are float32, one for each column.
3. A mask that only hides later keys or nothing becomes zeros [1, 1, 1, 1]. Any other is added as it is, [.., S, S].
4. Key padding also gives `lengths`: behind the last valid key nothing is computed, and y is zero there. Padding need
   not be at the end, so the mask stays.

What the kernels do not take is refused, and the block stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.fusion.lower_block import LoweredBlock
from trtforge.fusion.lower_block_weights import BlockWeights
from trtforge.fusion.lower_nodes import NodeAdder, bias_of_terms
from trtforge.fusion.regions import Attention, AttentionFfnBlock, KeyPadding
from trtforge.fusion.sizes import KnownSizes, same_size
from trtforge.fusion.view import StoppedError, op_name
from trtforge.graph.signature import tensor_dtype
from trtforge.ops.attention_ffn import (
    DOMAIN,
    HEAD_SIZES,
    OPSET,
    VERSION,
    WIDTH_MULTIPLE,
    Variant,
    attributes_of,
    function_from_variant,
    inputs_of,
)

# What the kernels compute in.
DTYPES = ("float16", "bfloat16")


def block_forms(graph: gs.Graph, blocks: Sequence[AttentionFfnBlock]) -> tuple[dict[str, str], dict[str, str]]:
    """What blocks would become in half precision: op type by name; and why others would stay. Nothing is changed."""
    lowering = BlockLowering(graph)
    forms: dict[str, str] = {}
    unfit: dict[str, str] = {}
    for block in blocks:
        try:
            lowering.check_sizes(block)
        except StoppedError as stop:
            unfit[block.name] = str(stop)
        else:
            forms[block.name] = _variant_of(block, is_int8=False).op_type
    return forms, unfit


class BlockLowering:
    """Makes nodes of the blocks of one graph.

    Args:
        graph: on which the blocks were matched; `lower` and `finish` modify it.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self._graph = graph
        self._nodes = {str(node.name): node for node in graph.nodes}
        self._tensors: dict[str, gs.Tensor] = graph.tensors()
        self._sizes = KnownSizes(graph)
        self._weights = BlockWeights(self._nodes, self._tensors)
        self._adder = NodeAdder(graph)
        self._lengths: dict[tuple[KeyPadding, object], gs.Tensor] = {}
        self._lowered: list[tuple[AttentionFfnBlock, Variant, gs.Variable]] = []

    def lower(self, block: AttentionFfnBlock) -> None:
        """Put one node in the place of a block.

        Raises:
            StoppedError: the kernels do not take it; nothing was changed.
        """
        x, output = self._tensors[block.x], self._tensors[block.output]
        self.check_sizes(block)
        dtype = self._check_type(block, x)
        weights = self._weights.layers(block, dtype)
        mask = block.attention.mask
        variant = _variant_of(block, is_int8=weights["qkv"].is_int8)
        place = self._nodes[block.residual2]
        operands: dict[str, gs.Tensor] = {"x": x, "attention_bias": self._bias(block.attention, place, dtype)}
        for role, values in weights.items():
            weight = values.weight.values.T if values.is_int8 else values.weight.values
            operands[f"w_{role}"] = self._adder.constant(f"{block.name}_w_{role}", np.ascontiguousarray(weight))
            operands[f"b_{role}"] = self._adder.constant(f"{block.name}_b_{role}", values.bias)
            if values.weight.scales is not None:
                scales = values.weight.scales.astype(np.float32)
                operands[f"w_{role}_scale"] = self._adder.constant(f"{block.name}_w_{role}_scale", scales)
        operands |= self._norms(block, dtype)
        if mask.key_padding is not None:
            operands["lengths"] = self._length_of(mask.key_padding, x, place)
        numbers: dict[str, Any] = {
            "num_heads": block.attention.num_heads,
            "softmax_scale": float(block.attention.softmax_scale),
            "epsilon": float(block.norm1.epsilon),
            **{f"{role}_input_scale": values.input_scale for role, values in weights.items()},
        }
        inputs = [operands[given.name] for given in inputs_of(variant)]
        attrs = {attribute.name: numbers[attribute.name] for attribute in attributes_of(variant)}
        self._rewire_sizes(block, x)
        is_rows = self._sizes.rank(output) == 2
        y = self._adder.add(
            place, variant.op_type, inputs, attrs, result=None if is_rows else output, dtype=dtype, domain=DOMAIN,
            wanted=block.name,
        )  # fmt: skip
        if is_rows:
            shape = self._adder.constant(f"{block.name}_rows", np.array([-1, weights["out"].bias.size]))
            self._adder.add(place, "Reshape", [y, shape], result=output)
        self._lowered.append((block, variant, y))

    def finish(self) -> tuple[LoweredBlock, ...]:
        """Put the nodes in, with their bodies."""
        self._adder.finish()
        if self._lowered:
            self._attach_bodies()
        return tuple(
            LoweredBlock(block.name, variant.op_type, str(y.inputs[0].name)) for block, variant, y in self._lowered
        )

    def _attach_bodies(self) -> None:
        variants = {variant.op_type: variant for _, variant, _ in self._lowered}
        bodies = [function_from_variant(variant) for variant in variants.values()]
        imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)]
        empty = onnx.helper.make_graph([], "bodies", [], [])
        model = onnx.helper.make_model(empty, functions=bodies, opset_imports=imports)
        functions = gs.import_onnx(model).functions
        for function in functions:
            function.import_domains = imports[:1]
        self._graph.functions = [*self._graph.functions, *functions]
        if all(entry.domain != DOMAIN for entry in self._graph.import_domains or ()):
            self._graph.import_domains = [*(self._graph.import_domains or ()), imports[1]]

    def _check_type(self, block: AttentionFfnBlock, x: gs.Tensor) -> np.dtype[Any]:
        """The type of the block.

        Raises:
            StoppedError: one that the kernels do not take.
        """
        dtype = tensor_dtype(x.dtype)
        if dtype is None or dtype.name not in DTYPES:
            first = self._nodes[block.nodes[0]]
            raise StoppedError(first, f"it computes in {dtype}; the plugin takes {' and '.join(DTYPES)}")
        return dtype

    def check_sizes(self, block: AttentionFfnBlock) -> None:
        """Refuse sizes that the kernels do not take.

        Raises:
            StoppedError: names the size.
        """
        attention, first = block.attention, self._nodes[block.nodes[0]]
        if self._graph.opset < OPSET:
            raise StoppedError(first, f"the operator needs opset {OPSET}; this model stays at {self._graph.opset}")
        if self._sizes.rank(self._tensors[block.x]) != 3:
            raise StoppedError(first, "what it reads is not known as [batch, sequence, width]")
        if 0 in (self._sizes.of(self._tensors[block.x]) or ()):
            raise StoppedError(first, "what it reads is empty")
        if attention.head_size not in HEAD_SIZES:
            heads = ", ".join(map(str, HEAD_SIZES))
            raise StoppedError(first, f"its heads are {attention.head_size} wide; the plugin takes {heads}")
        for what, width in (("H", attention.num_heads * attention.head_size), ("F", block.ffn.up.width)):
            if width % WIDTH_MULTIPLE:
                raise StoppedError(first, f"its {what} is {width}; the plugin takes multiples of {WIDTH_MULTIPLE}")
        for term in attention.mask.terms:
            rank = self._sizes.rank(self._tensors[term.tensor])
            if rank not in (2, 4):
                raise StoppedError(self._nodes[term.node], f"its mask has {rank} axes; the plugin takes 2 or 4")

    def _norms(self, block: AttentionFfnBlock, dtype: np.dtype[Any]) -> dict[str, gs.Tensor]:
        """Gamma and beta of both normalisations.

        Raises:
            StoppedError: one is computed.
        """
        width = block.attention.num_heads * block.attention.head_size
        found: dict[str, gs.Tensor] = {}
        for index, norm in enumerate((block.norm1, block.norm2), 1):
            for what, name, default in (("gamma", norm.gamma, 1), ("beta", norm.beta, 0)):
                values = np.full(width, default, dtype)
                if name is not None:
                    values = self._weights.constant(self._nodes[norm.node], name, dtype).reshape(-1)
                label = f"ln{index}_{what}"
                found[label] = self._adder.constant(f"{block.name}_{label}", values)
        return found

    def _bias(self, attention: Attention, place: gs.Node, dtype: np.dtype[Any]) -> gs.Tensor:
        """Rule 3, with four axes."""
        mask = attention.mask
        if not mask.terms or (mask.is_explained and mask.key_padding is None):
            return self._adder.constant(f"{attention.name}_no_bias", np.zeros((1, 1, 1, 1), dtype))
        bias = bias_of_terms(self._adder, mask.terms, self._tensors, place, dtype)
        if tensor_dtype(bias.dtype) != dtype:
            to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
            bias = self._adder.add(place, "Cast", [bias], {"to": int(to)}, dtype=dtype)
        if all(self._sizes.rank(self._tensors[term.tensor]) == 2 for term in mask.terms):
            axes = self._adder.constant(f"{attention.name}_axes", np.array([0, 1]))
            bias = self._adder.add(place, "Unsqueeze", [bias, axes])
        return bias

    def _length_of(self, padding: KeyPadding, x: gs.Tensor, place: gs.Node) -> gs.Tensor:
        """Rule 4: the last valid key plus one, [B]; one for all blocks with this padding and these sizes."""
        adder, source = self._adder, self._tensors[padding.tensor]
        wanted = (self._sizes.of(x) or ())[:2]
        key = (padding, wanted)
        if key not in self._lengths:
            if self._sizes.of(source) != wanted:
                # One sample may stand for all, or one key for the whole sequence.
                shape = adder.add(place, "Shape", [x], {"start": 0, "end": 2}, dtype=np.int64)
                source = adder.add(place, "Expand", [source, shape])
            as_bool, as_int64, as_int32 = ({"to": t} for t in (onnx.TensorProto.BOOL, 7, onnx.TensorProto.INT32))
            is_valid = adder.add(place, "Cast", [source], as_bool, dtype=np.bool_)
            if not padding.is_padding_zero:
                is_valid = adder.add(place, "Not", [is_valid])
            counted = adder.add(place, "Cast", [is_valid], as_int64, dtype=np.int64)
            zero, one, last = (adder.constant("number", np.array(value)) for value in (0, 1, [1]))
            count = adder.add(place, "Shape", [source], {"start": 1, "end": 2}, dtype=np.int64)
            end = adder.add(place, "Add", [adder.add(place, "Squeeze", [count]), one])
            positions = adder.add(place, "Range", [one, end, one], dtype=np.int64)
            ends = adder.add(place, "Mul", [counted, positions])
            longest = adder.add(place, "ReduceMax", [ends, last], {"keepdims": 0})
            longest = adder.add(place, "Max", [longest, zero])
            self._lengths[key] = adder.add(place, "Cast", [longest], as_int32, dtype=np.int32)
        return self._lengths[key]

    def _rewire_sizes(self, block: AttentionFfnBlock, x: gs.Tensor) -> None:
        """Let what wants batch or sequence of a tensor inside, for a mask that stays, read them of x."""
        inside, known = set(block.nodes), self._sizes.of(x) or ()
        for name in block.size_readers:
            node = self._nodes[name]
            tensor = node.inputs[0]
            sizes = self._sizes.of(tensor)
            is_inside = bool(tensor.inputs) and tensor.inputs[0].name in inside
            if op_name(node) != "Shape" or not is_inside or sizes is None:
                continue
            wanted = slice(node.attrs.get("start", 0), node.attrs.get("end", len(sizes)))
            is_counted_from_front = min(wanted.start, wanted.stop) >= 0 and wanted.stop <= len(known)
            if is_counted_from_front and all(map(same_size, sizes[wanted], known[wanted])):
                node.inputs[0] = x


def _variant_of(block: AttentionFfnBlock, *, is_int8: bool) -> Variant:
    mask = block.attention.mask
    return Variant(
        block.order,
        block.ffn.activation.kind,  # type: ignore[arg-type]  # match_block takes no other
        is_causal=mask.is_causal,
        is_int8=is_int8,
        has_lengths=mask.key_padding is not None,
    )
