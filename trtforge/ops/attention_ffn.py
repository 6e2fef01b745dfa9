"""trtforge::AttentionFFN_*, version 1: one transformer block as one operator.

    post-norm: h = norm1(x + attention(x)),  y = norm2(h + ffn(h))
    pre-norm:  h = x + attention(norm1(x)),  y = h + ffn(norm2(h))

What changes the structure is part of the op type, because the body of an ONNX function can branch neither on an
attribute nor on a missing input. A variant with `_lengths` therefore always has that input, the others never do.
Rows from lengths[b] on are padding: hidden as keys, and zero in y.

An int8 variant quantizes the input of each of the four products with one scale, and takes weights as int8 codes
[columns, K], K a multiple of 16: the layout that the kernels read, so that nothing is repacked when an engine runs.

Named dims: B batch, S sequence, H width, N heads, F inner width. T is float16, bfloat16 or float32; the plugin takes
the first two.

Its names and tables are also read where there is no onnx: only a body needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Literal

from trtforge.errors import InputError

if TYPE_CHECKING:
    import onnx

DOMAIN = "trtforge"
VERSION = 1
# Of the standard operators in the bodies; the first in which ONNX Runtime takes what else trtforge makes.
OPSET = 23
# K of an int8 weight is a multiple of it: rows are copied in 16 bytes.
INT8_K_MULTIPLE = 16
# What the kernels are compiled for; H and F are multiples of the 8 elements of a 16-byte copy.
HEAD_SIZES = (32, 64, 80, 96, 128)
WIDTH_MULTIPLE = 8

NormOrder = Literal["pre", "post"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
ORDERS: tuple[NormOrder, ...] = ("pre", "post")
ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "relu", "silu")

Condition = Literal["always", "int8", "lengths"]


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One op type.

    Attributes:
        order: of LayerNorms and residual Adds.
        activation: between the two products of the FFN; "gelu" is the one with erf.
        is_causal: row i sees the keys 0..i.
        is_int8: products of int8 codes.
        has_lengths: the last input is lengths [B], int32.
    """

    order: NormOrder
    activation: Activation
    is_causal: bool = False
    is_int8: bool = False
    has_lengths: bool = False

    @property
    def op_type(self) -> str:
        """As in `AttentionFFN_post_gelu_causal_int8_lengths`."""
        flags = [("causal", self.is_causal), ("int8", self.is_int8), ("lengths", self.has_lengths)]
        return "_".join(["AttentionFFN", self.order, self.activation, *(name for name, is_set in flags if is_set)])

    def meets(self, condition: Condition) -> bool:
        """True where an input or attribute with this condition belongs to the variant."""
        return {"always": True, "int8": self.is_int8, "lengths": self.has_lengths}[condition]


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One input.

    Attributes:
        kind: its type: "value" is T, "weight" T or (int8 variants) int8, "scale" float32, "lengths" int32.
        dims: named; of a weight as [K, columns], which an int8 variant has the other way round.
        condition: of the variants that have it.
    """

    name: str
    kind: Literal["value", "weight", "scale", "lengths"]
    dims: tuple[str, ...]
    condition: Condition = "always"


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute; all are required."""

    name: str
    kind: Literal["int", "float"]
    condition: Condition = "always"


# In the order of the operator. plugins/csrc/fields.h has the same two tables.
INPUTS = (
    Input("x", "value", ("B", "S", "H")),
    Input("attention_bias", "value", ("B|1", "N|1", "S|1", "S|1")),
    Input("w_qkv", "weight", ("H", "3H")),
    Input("b_qkv", "value", ("3H",)),
    Input("w_out", "weight", ("H", "H")),
    Input("b_out", "value", ("H",)),
    Input("ln1_gamma", "value", ("H",)),
    Input("ln1_beta", "value", ("H",)),
    Input("w_up", "weight", ("H", "F")),
    Input("b_up", "value", ("F",)),
    Input("w_down", "weight", ("F", "H")),
    Input("b_down", "value", ("H",)),
    Input("ln2_gamma", "value", ("H",)),
    Input("ln2_beta", "value", ("H",)),
    Input("w_qkv_scale", "scale", ("3H",), "int8"),
    Input("w_out_scale", "scale", ("H",), "int8"),
    Input("w_up_scale", "scale", ("F",), "int8"),
    Input("w_down_scale", "scale", ("H",), "int8"),
    Input("lengths", "lengths", ("B",), "lengths"),
)

ATTRIBUTES = (
    Attribute("num_heads", "int"),
    Attribute("softmax_scale", "float"),
    Attribute("epsilon", "float"),
    Attribute("qkv_input_scale", "float", "int8"),
    Attribute("out_input_scale", "float", "int8"),
    Attribute("up_input_scale", "float", "int8"),
    Attribute("down_input_scale", "float", "int8"),
)

# The lowest float32: as a score it is hidden, and a row in which all is hidden stays finite.
_HIDDEN = -3.4028234663852886e38

_ACTIVATION_BODIES: dict[Activation, str] = {
    "gelu": 'inner = Gelu <approximate: string = "none"> (up)',
    "gelu_tanh": 'inner = Gelu <approximate: string = "tanh"> (up)',
    "relu": "inner = Relu (up)",
    "silu": "gate = Sigmoid (up)\n inner = Mul (up, gate)",
}


def all_variants() -> tuple[Variant, ...]:
    """Every op type, each once."""
    flags = (False, True)
    return tuple(Variant(*choice) for choice in itertools.product(ORDERS, ACTIVATIONS, flags, flags, flags))


def variant_from_op_type(op_type: str) -> Variant:
    """The variant with this op type.

    Raises:
        InputError: there is none.
    """
    for variant in all_variants():
        if variant.op_type == op_type:
            return variant
    raise InputError(
        f"{DOMAIN}::{op_type} is not an operator of this trtforge",
        "it knows AttentionFFN_{pre|post}_{gelu|gelu_tanh|relu|silu}[_causal][_int8][_lengths]",
        "lower the model again with this version",
    )


def inputs_of(variant: Variant) -> tuple[Input, ...]:
    """The inputs of a variant, in order."""
    return tuple(given for given in INPUTS if variant.meets(given.condition))


def attributes_of(variant: Variant) -> tuple[Attribute, ...]:
    """The attributes of a variant."""
    return tuple(attribute for attribute in ATTRIBUTES if variant.meets(attribute.condition))


@functools.cache
def function_from_variant(variant: Variant) -> onnx.FunctionProto:
    """The body: standard operators that compute what the plugin computes, for any executor.

    Scores, their softmax and the statistics of LayerNorm are float32, whatever T is. Treat the result as read-only.
    """
    import onnx.parser

    names = ", ".join(attribute.name for attribute in attributes_of(variant))
    inputs = ", ".join(given.name for given in inputs_of(variant))
    head = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>'
    lines = (*_block_lines(variant), "")
    return onnx.parser.parse_function(
        f"{head}\n{variant.op_type} <{names}> ({inputs}) => (y)\n{{\n" + "\n".join(lines) + "}"
    )


def _block_lines(variant: Variant) -> list[str]:
    if variant.order == "pre":
        return [
            *_norm_lines("x", "ln1", "attention_input"),
            *_attention_lines(variant, "attention_input"),
            "h = Add (x, out)",
            *_norm_lines("h", "ln2", "ffn_input"),
            *_ffn_lines(variant, "ffn_input"),
            *_end_lines(variant, ["{} = Add (h, down)"]),
        ]
    return [
        *_attention_lines(variant, "x"),
        "sum1 = Add (x, out)",
        *_norm_lines("sum1", "ln1", "h"),
        *_ffn_lines(variant, "h"),
        "sum2 = Add (h, down)",
        *_end_lines(variant, _norm_lines("sum2", "ln2", "{}")),
    ]


def _end_lines(variant: Variant, lines: list[str]) -> list[str]:
    """The lines that give `{}`, and what makes it y."""
    if not variant.has_lengths:
        return [line.format("y") for line in lines]
    return [
        *(line.format("rows") for line in lines),
        "last_axis = Constant <value_ints: ints = [2]> ()",
        "is_row = Unsqueeze (is_valid, last_axis)",
        "nothing = Constant <value_float: float = 0.0> ()",
        "padding = CastLike (nothing, x)",
        "y = Where (is_row, rows, padding)",
    ]


def _norm_lines(x: str, norm: str, y: str) -> list[str]:
    return [f"{y} = LayerNormalization <axis: int = -1, epsilon: float = @epsilon> ({x}, {norm}_gamma, {norm}_beta)"]


def _ffn_lines(variant: Variant, x: str) -> list[str]:
    return [
        *_linear_lines(variant, x, "up", "up"),
        _ACTIVATION_BODIES[variant.activation],
        *_linear_lines(variant, "inner", "down", "down"),
    ]


def _linear_lines(variant: Variant, x: str, role: str, y: str) -> list[str]:
    """Y = x w_role + b_role. The scale of x is cast to T, as it is in a graph with Q/DQ."""
    if not variant.is_int8:
        return [f"{y}_product = MatMul ({x}, w_{role})", f"{y} = Add ({y}_product, b_{role})"]
    return [
        f"{role}_scale_float = Constant <value_float: float = @{role}_input_scale> ()",
        f"{role}_scale = CastLike ({role}_scale_float, x)",
        f"{role}_zero = Constant <value: tensor = int8 {{0}}> ()",
        f"{role}_codes = QuantizeLinear ({x}, {role}_scale, {role}_zero)",
        f"{role}_input = DequantizeLinear ({role}_codes, {role}_scale, {role}_zero)",
        f"{role}_weight_scale = CastLike (w_{role}_scale, x)",
        f"{role}_rows = DequantizeLinear <axis: int = 0> (w_{role}, {role}_weight_scale)",
        f"{role}_weight = Transpose <perm: ints = [1, 0]> ({role}_rows)",
        f"{y}_product = MatMul ({role}_input, {role}_weight)",
        f"{y} = Add ({y}_product, b_{role})",
    ]


def _attention_lines(variant: Variant, x: str) -> list[str]:
    """Gives `out` [B, S, H]."""
    return [
        *_linear_lines(variant, x, "qkv", "qkv"),
        "num_heads_scalar = Constant <value_int: int = @num_heads> ()",
        "inferred = Constant <value_ints: ints = [-1]> ()",
        "heads = Reshape (num_heads_scalar, inferred)",
        "three_parts = Constant <value_ints: ints = [0, 0, 3]> ()",
        "packed_shape = Concat <axis: int = 0> (three_parts, heads, inferred)",
        "packed = Reshape (qkv, packed_shape)",
        "parts = Transpose <perm: ints = [2, 0, 3, 1, 4]> (packed)",
        *_part_lines("q", 0),
        *_part_lines("k", 1),
        *_part_lines("v", 2),
        "q_float = Cast <to: int = 1> (q)",
        "k_float = Cast <to: int = 1> (k)",
        "keys = Transpose <perm: ints = [0, 1, 3, 2]> (k_float)",
        "products = MatMul (q_float, keys)",
        "scale = Constant <value_float: float = @softmax_scale> ()",
        "scaled = Mul (products, scale)",
        "bias_float = Cast <to: int = 1> (attention_bias)",
        "biased = Add (scaled, bias_float)",
        *_mask_lines(variant),
        "weights_float = Softmax <axis: int = -1> (scores)",
        "weights = CastLike (weights_float, x)",
        "context_heads = MatMul (weights, v)",
        "context_rows = Transpose <perm: ints = [0, 2, 1, 3]> (context_heads)",
        "merged_shape = Constant <value_ints: ints = [0, 0, -1]> ()",
        "context = Reshape (context_rows, merged_shape)",
        *_linear_lines(variant, "context", "out", "out"),
    ]


def _part_lines(name: str, index: int) -> list[str]:
    """Gives [B, N, S, D]."""
    return [
        f"{name}_index = Constant <value_int: int = {index}> ()",
        f"{name} = Gather <axis: int = 0> (parts, {name}_index)",
    ]


def _mask_lines(variant: Variant) -> list[str]:
    """Gives `scores`, in which hidden keys are the lowest float; with lengths also `is_valid` [B, S]."""
    if not variant.is_causal and not variant.has_lengths:
        return ["scores = Identity (biased)"]
    lines = [
        f"hidden = Constant <value_float: float = {_HIDDEN!r}> ()",
        "length = Shape <start: int = 1, end: int = 2> (x)",
        "no_axes = Constant <value_ints: ints = [0]> ()",
        "limit = Squeeze (length, no_axes)",
        "begin = Constant <value_int: int = 0> ()",
        "step = Constant <value_int: int = 1> ()",
        "positions = Range (begin, limit, step)",
    ]
    seen = "biased"
    if variant.is_causal:
        lines += [
            "queries_axis = Constant <value_ints: ints = [1]> ()",
            "queries = Unsqueeze (positions, queries_axis)",
            "is_past = LessOrEqual (positions, queries)",
            "causal_scores = Where (is_past, biased, hidden)",
        ]
        seen = "causal_scores"
    if variant.has_lengths:
        lines += [
            "lengths_axis = Constant <value_ints: ints = [1]> ()",
            "lengths_wide = Cast <to: int = 7> (lengths)",
            "ends = Unsqueeze (lengths_wide, lengths_axis)",
            "is_valid = Less (positions, ends)",
            "keys_axes = Constant <value_ints: ints = [1, 2]> ()",
            "is_key = Unsqueeze (is_valid, keys_axes)",
            f"valid_scores = Where (is_key, {seen}, hidden)",
        ]
        seen = "valid_scores"
    return [*lines, f"scores = Identity ({seen})"]
