"""Which activation a chain of element-wise nodes is, found by computing it.

GELU alone has a dozen spellings: factors in any order, 0.5 outside or inside, x * x * x or Pow, Div or Mul by sqrt(2).
All of them are one function of one number. So the nodes between a tensor and what it comes from are collected as long
as they are element-wise with single numbers as constants, computed in float64 on a grid, and compared with each known
activation. The nearest two, GELU by erf and by tanh, differ by 4.7e-4; constants stored in float16 move them by 1e-4.
Constants stored in bfloat16 move them by 3.4e-4: there, the operator tells the two apart.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.fusion.regions import Activation, ActivationKind
from trtforge.fusion.view import View, casts_to_float, number_of, op_name, producer_of, source_of

Array = np.ndarray[Any, Any]

# Far points tell ReLU from ReLU6, where rounded constants may be off by a share of the number.
_GRID = np.concatenate([np.linspace(-6.0, 6.0, 97), [-1e4, -100.0, -20.0, -10.0, 10.0, 20.0, 100.0, 1e4]])
_TOLERANCE = np.where(np.abs(_GRID) > 6.0, 1e-3 * np.abs(_GRID), 2e-4)
# How much more constants in bfloat16 may move a function; the next nearest, GELU by erf and by sigmoid, differ by 2e-2.
_BFLOAT16_FACTOR = 4
# GELU by tanh with x * x * x has eleven nodes.
_MAX_NODES = 24

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))))


KINDS: Mapping[ActivationKind, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": _gelu,
        "gelu_tanh": _gelu_tanh,
        "gelu_sigmoid": lambda x: x * _sigmoid(1.702 * x),
        "relu": lambda x: np.maximum(x, 0.0),
        "silu": lambda x: x * _sigmoid(x),
    }
)
"""Every activation by its kind."""

_FUNCTIONS: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "Abs": np.abs,
        "Add": np.add,
        "Clip": lambda x, low=-np.inf, high=np.inf: np.minimum(np.maximum(x, low), high),
        "Div": np.divide,
        "Erf": _erf,
        "Exp": np.exp,
        "Identity": lambda x: x,
        "Max": lambda *operands: functools.reduce(np.maximum, operands),
        "Min": lambda *operands: functools.reduce(np.minimum, operands),
        "Mul": np.multiply,
        "Neg": np.negative,
        "Pow": np.power,
        "Reciprocal": np.reciprocal,
        "Relu": KINDS["relu"],
        "Sigmoid": _sigmoid,
        "Softplus": lambda x: np.log1p(np.exp(x)),
        "Sqrt": np.sqrt,
        "Sub": np.subtract,
        "Tanh": np.tanh,
    }
)
# Activations that are none of the kinds; they are collected so that a near miss can name them.
_OTHER_OPS = frozenset(("Celu", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Selu", "Softsign", "Swish"))


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """The element-wise nodes that give a tensor, and the tensors that they start from.

    Attributes:
        nodes: the last one first; none where the tensor is no element-wise result.
        starts: what they read, constants aside.
    """

    nodes: tuple[gs.Node, ...]
    starts: tuple[gs.Tensor, ...]


def chain_behind(tensor: gs.Tensor, is_start: Callable[[gs.Tensor], bool]) -> Chain:
    """Follow a tensor back through element-wise nodes.

    Args:
        is_start: True for a tensor that is not followed further.
    """
    tensor = source_of(tensor)
    nodes: dict[int, gs.Node] = {}
    starts: dict[int, gs.Tensor] = {}
    pending = [tensor]
    while pending:
        current = source_of(pending.pop())
        node = None if is_start(current) else producer_of(current)
        if node is None or not _is_elementwise(node) or (id(node) not in nodes and len(nodes) == _MAX_NODES):
            starts[id(current)] = current
        elif id(node) not in nodes:
            nodes[id(node)] = node
            pending += [operand for operand in node.inputs if operand.name and number_of(operand) is None]
    return Chain(tuple(nodes.values()), tuple(starts.values()))


def activation_of(view: View, chain: Chain, output: gs.Tensor) -> Activation | None:
    """The activation that a chain with one start computes; None where it is no known one."""
    ordered = sorted(chain.nodes, key=lambda node: view.order[id(node)])
    values: dict[int, Any] = {id(chain.starts[0]): _GRID}
    other = {"Erf": "gelu_tanh", "Tanh": "gelu"}
    excluded = {other[op] for op in map(op_name, chain.nodes) if op in other}
    tolerance = _TOLERANCE * (_BFLOAT16_FACTOR if any(map(_reads_bfloat16, chain.nodes)) else 1)
    with np.errstate(all="ignore"):
        for node in ordered:
            result = _compute(node, values)
            if result is None:
                return None
            values[id(node.outputs[0])] = result
        result = values[id(source_of(output))]
        for kind, function in KINDS.items():
            if kind in excluded:
                continue
            error = np.abs(result - function(_GRID))
            if np.shape(result) == _GRID.shape and bool((error <= tolerance).all()):
                return Activation(kind, str(chain.nodes[0].name), tuple(str(node.name) for node in ordered))
    return None


def _compute(node: gs.Node, values: Mapping[int, Any]) -> Any:
    """One node on the grid; None where it has no formula here."""
    op = op_name(node)
    operands: list[Any] = []
    for tensor in node.inputs:
        number = number_of(tensor) if tensor.name else None
        if number is None and id(source_of(tensor)) not in values:
            return None
        operands.append(values[id(source_of(tensor))] if number is None else np.float64(number))
    if op == "Gelu":
        return KINDS["gelu_tanh" if node.attrs.get("approximate") == "tanh" else "gelu"](*operands)
    if op == "Swish":
        return operands[0] * _sigmoid(float(node.attrs.get("alpha", 1.0)) * operands[0])
    if op == "Cast":
        return operands[0] if casts_to_float(node) else None
    is_known = op in _FUNCTIONS and (op in ("Max", "Min", "Clip") or len(operands) == _num_operands(op))
    return _FUNCTIONS[op](*operands) if is_known and 1 <= len(operands) <= 3 else None


def _reads_bfloat16(node: gs.Node) -> bool:
    return any(isinstance(operand, gs.Constant) and str(operand.dtype) == "bfloat16" for operand in node.inputs)


def _num_operands(op: str) -> int:
    return 2 if op in ("Add", "Div", "Mul", "Pow", "Sub") else 1


def _is_elementwise(node: gs.Node) -> bool:
    return op_name(node) in _FUNCTIONS or op_name(node) in ("Cast", "Gelu") or op_name(node) in _OTHER_OPS
