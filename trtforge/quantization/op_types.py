"""Element types of operator inputs and outputs, read from the ONNX operator schemas.

A schema names a type variable per formal input and output ("T", "T1") and the types each variable may take, or one
fixed type ("tensor(float)"). Inputs and outputs with one variable have one type: all that casting needs to know.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_onnx_op

_TYPE_NAMES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(int64)": np.dtype(np.int64),
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class OpTypes:
    """One operator's type variables.

    Attributes:
        inputs: the variable of each formal input.
        outputs: the variable of each formal output.
        allowed: the ONNX type names that each variable may take.
        is_input_variadic: the last formal input repeats.
        is_output_variadic: the last formal output repeats.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: dict[str, frozenset[str]]
    is_input_variadic: bool
    is_output_variadic: bool

    def input_variable(self, index: int) -> str | None:
        """The type variable of the node's input at this index."""
        return _formal(self.inputs, index, self.is_input_variadic)

    def output_variable(self, index: int) -> str | None:
        """The type variable of the node's output at this index."""
        return _formal(self.outputs, index, self.is_output_variadic)

    def allows(self, variable: str, dtype: str) -> bool:
        """True when the variable may be `tensor(dtype)`, dtype as ONNX spells it: "float16", "bfloat16"."""
        return f"tensor({dtype})" in self.allowed.get(variable, frozenset((variable,)))


def _formal(variables: tuple[str, ...], index: int, is_variadic: bool) -> str | None:
    if index < len(variables):
        return variables[index]
    return variables[-1] if is_variadic and variables else None


@functools.lru_cache(maxsize=1024)
def op_types(op: str, domain: str, opset: int) -> OpTypes | None:
    """The type variables of an operator, or None where no schema is known or a variadic input mixes types."""
    try:
        schema = onnx.defs.get_schema(op, opset, domain)
    except onnx.defs.SchemaError:
        return None
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    formals = [*schema.inputs, *schema.outputs]
    if any(formal.option == variadic and not formal.is_homogeneous for formal in formals):
        return None
    return OpTypes(
        tuple(formal.type_str for formal in schema.inputs),
        tuple(formal.type_str for formal in schema.outputs),
        {rule.type_param_str: frozenset(rule.allowed_type_strs) for rule in schema.type_constraints},
        any(formal.option == variadic for formal in schema.inputs),
        any(formal.option == variadic for formal in schema.outputs),
    )


def node_types(node: gs.Node, graph: gs.Graph) -> OpTypes | None:
    """The type variables of a node's operator at the graph's opset; None for operators of other domains."""
    return op_types(node.op, "", graph.opset) if is_onnx_op(node) else None


def onnx_type_of_attribute(value: object) -> int:
    """An attribute such as Cast's `to`, which graphsurgeon may hold as a numpy type, as the ONNX enum."""
    return value if isinstance(value, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(value)))  # type: ignore[call-overload]


def fill_element_types(graph: gs.Graph) -> None:
    """Give every tensor of the main graph whose element type is missing the one that its producer's schema implies.

    Args:
        graph: topologically sorted; only `dtype` of tensors is set, and left None where nothing implies it.
    """
    for node in graph.nodes:
        types = node_types(node, graph)
        if types is None:
            continue
        bound = {types.input_variable(index): tensor.dtype for index, tensor in enumerate(node.inputs) if tensor.name}
        for index, tensor in enumerate(node.outputs):
            if tensor.dtype is None and tensor.name:
                variable = types.output_variable(index)
                tensor.dtype = _attribute_type(node) or bound.get(variable) or _TYPE_NAMES.get(_only(types, variable))


def _only(types: OpTypes, variable: str | None) -> str:
    """The one type name that a variable can take, or ""."""
    names = types.allowed.get(variable or "", frozenset((variable or "",)))
    return next(iter(names)) if len(names) == 1 else ""


def _attribute_type(node: gs.Node) -> np.dtype[np.generic] | None:
    """The output type of the operators that state it as an attribute."""
    if node.op == "Cast":
        value = onnx_type_of_attribute(node.attrs["to"])
        return BFLOAT16 if value == onnx.TensorProto.BFLOAT16 else np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value))
    if node.op == "ConstantOfShape":
        return np.dtype(node.attrs["value"].dtype) if "value" in node.attrs else np.dtype(np.float32)
    if node.op == "DequantizeLinear" and "output_dtype" not in node.attrs:
        dtype = node.inputs[1].dtype
        return None if dtype is None else np.dtype(dtype)
    return None
