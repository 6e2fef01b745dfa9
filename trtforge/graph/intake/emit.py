"""How a rule writes the nodes that take another one's place.

Nodes are collected first and connected by `commit`: a rule that gives up half-way leaves the graph as it was. Types are
given where a rule knows them, so that the next rule need not wait for a round of type inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import is_array
from trtforge.graph.intake.rewrites import NotYetError, RefusedError
from trtforge.graph.names import UniqueNames
from trtforge.graph.signature import tensor_dtype

Array = np.ndarray[Any, Any]
Dtype = np.dtype[Any]

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)

# Part of the names of nodes whose numbers are integers held as float32: no lower float type holds them.
EXACT_MARK = "/exact_int8/"


def needs_float32(node: gs.Node) -> bool:
    """True for a node that a rule wrote for integers held as float32."""
    return EXACT_MARK in (node.name or "")


class Emitter:
    """Writes the nodes that replace one node at a time.

    Args:
        names: names that the graph has free.
        opset: version of the default domain.
        kept: identities of the tensors that a graph gives as outputs.
        exact_products: see `rewrite_operators`.
    """

    def __init__(
        self, names: UniqueNames, opset: int, kept: frozenset[int] = frozenset(), *, exact_products: bool = True
    ) -> None:
        self.opset = opset
        self._kept = kept
        self.exact_products = exact_products
        self.mark = "/"
        self._names = names
        self._prefix = ""
        self._nodes: list[gs.Node] = []

    def begin(self, node: gs.Node) -> None:
        """Start to replace a node; what was written and not committed is dropped."""
        self._prefix, self.mark, self._nodes = node.name, "/", []

    def __call__(
        self, op: str, *inputs: gs.Tensor | None, dtype: Dtype | None = None, shape: Any = None, **attrs: Any
    ) -> gs.Variable:
        """A new node's only output. Inputs that are None are left out; attributes that are None are not written."""
        return self.many(op, inputs, [dtype], shape=shape, **attrs)[0]

    def many(
        self,
        op: str,
        inputs: Sequence[gs.Tensor | None],
        dtypes: Sequence[Dtype | None],
        shape: Any = None,
        **attrs: Any,
    ) -> list[gs.Variable]:
        """A new node's outputs, as many as there are `dtypes`."""
        given = {key: value for key, value in attrs.items() if value is not None}
        node = gs.Node(op, self._names.node(f"{self._prefix}{self.mark}{op}"), attrs=given)
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        list.extend(node.inputs, [gs.Variable.empty() if tensor is None else tensor for tensor in inputs])
        outputs = [gs.Variable(self._names.tensor(f"{node.name}_out"), dtype, shape) for dtype in dtypes]
        list.extend(node.outputs, outputs)
        self._nodes.append(node)
        return outputs

    def constant(self, values: npt.ArrayLike, dtype: npt.DTypeLike) -> gs.Constant:
        """A new initializer."""
        return gs.Constant(self._names.tensor(f"{self._prefix}/constant"), np.array(values, dtype))

    def ints(self, *values: int) -> gs.Constant:
        """A vector of int64."""
        return self.constant(list(values), INT64)

    def cast(self, tensor: gs.Tensor, dtype: Dtype) -> gs.Tensor:
        """The tensor in another type; itself where it has it."""
        if tensor_dtype(tensor.dtype) == dtype:
            return tensor
        to = int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
        return self("Cast", tensor, dtype=dtype, shape=tensor.shape, to=to)

    def reshape(self, tensor: gs.Tensor, *sizes: int, shape: Any = None) -> gs.Variable:
        """Reshape, with ONNX's meaning of 0 and -1."""
        return self("Reshape", tensor, self.ints(*sizes), dtype=tensor_dtype(tensor.dtype), shape=shape)

    def transpose(self, tensor: gs.Tensor, *order: int) -> gs.Variable:
        """Transpose."""
        shape = None if tensor.shape is None else [tensor.shape[axis] for axis in order]
        return self("Transpose", tensor, dtype=tensor_dtype(tensor.dtype), shape=shape, perm=list(order))

    def slice(self, tensor: gs.Tensor, axis: int, start: int, stop: int) -> gs.Variable:
        """Part of one axis."""
        inputs = (self.ints(start), self.ints(stop), self.ints(axis))
        return self("Slice", tensor, *inputs, dtype=tensor_dtype(tensor.dtype))

    def size_of(self, tensor: gs.Tensor, axis: int) -> gs.Variable:
        """The size of an axis as int64 `[1]`."""
        return self("Shape", tensor, dtype=INT64, shape=[1], start=axis, end=axis + 1 or None)

    def positions(self, count: gs.Tensor) -> gs.Variable:
        """0, 1, 2 ... as int64 `[count]`, from a count of shape `[1]`."""
        scalar = self("Squeeze", count, self.ints(0), dtype=INT64, shape=[])
        return self("Range", self.constant(0, INT64), scalar, self.constant(1, INT64), dtype=INT64, shape=[None])

    def is_read(self, node: gs.Node, index: int) -> bool:
        """True when something reads this output of a node."""
        if index >= len(node.outputs) or not node.outputs[index].name:
            return False
        return bool(node.outputs[index].outputs) or self.is_output(node.outputs[index])

    def is_output(self, tensor: gs.Tensor) -> bool:
        """True for an output of the graph or of a subgraph."""
        return id(tensor) in self._kept

    def commit(self, node: gs.Node, results: Sequence[gs.Tensor | None]) -> list[gs.Node]:
        """Connect what was written in the place of a node.

        Args:
            node: the one that goes; the caller takes it out of the graph.
            results: one tensor for each of its outputs; None where nothing reads it.

        Returns:
            The new nodes, in order.
        """
        made = {id(tensor) for new in self._nodes for tensor in new.outputs}
        renamed: dict[int, gs.Tensor] = {}
        for given, output in zip(results, node.outputs, strict=False):
            if given is None or not output.name:
                continue
            result = given
            if id(given) not in made or id(given) in renamed:
                result = self("Identity", renamed.get(id(given), given))
            renamed[id(result)] = output
            # A float form gives floats where the node gave codes; what the graph gives keeps its type.
            if output.dtype is None or (result.dtype is not None and not self.is_output(output)):
                output.dtype = result.dtype
            output.shape = output.shape if output.shape is not None else result.shape
        for new in self._nodes:
            for tensors in (new.inputs, new.outputs):
                for index, tensor in enumerate(tensors):
                    if id(tensor) in renamed:
                        list.__setitem__(tensors, index, renamed[id(tensor)])
            for tensor in new.inputs:
                list.append(tensor.outputs, new)
            for tensor in new.outputs:
                list.__setitem__(tensor.inputs, slice(None), [new])
        nodes, self._nodes = self._nodes, []
        return nodes


def dtype_of(tensor: gs.Tensor) -> Dtype:
    """A tensor's element type.

    Raises:
        NotYetError: it is not known.
    """
    dtype = tensor_dtype(tensor.dtype)
    if dtype is None:
        raise NotYetError(f"the element type of {tensor.name!r}")
    return dtype


def rank_of(tensor: gs.Tensor) -> int:
    """How many axes a tensor has.

    Raises:
        NotYetError: it is not known.
    """
    if tensor.shape is None:
        raise NotYetError(f"the number of axes of {tensor.name!r}")
    return len(tensor.shape)


def front_axis(axis: int, rank: int) -> int:
    """An axis of a tensor of this rank, counted from the front.

    Raises:
        RefusedError: there is no such axis.
    """
    if not -rank <= axis < rank:
        raise RefusedError(f"its axis {axis} is none of a tensor with {rank} axes", "export the model again")
    return axis % rank


def static_size(tensor: gs.Tensor, axis: int) -> int | None:
    """The size of an axis; None where it is open or not known."""
    if tensor.shape is None or not -len(tensor.shape) <= axis < len(tensor.shape):
        return None
    size = tensor.shape[axis]
    return size if isinstance(size, int) and size >= 0 else None


def optional_input(node: gs.Node, index: int) -> gs.Tensor | None:
    """A node's input; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) and node.inputs[index].name else None


def constant_values(tensor: gs.Tensor | None) -> Array | None:
    """A constant's numbers; None for anything else."""
    return np.asarray(tensor.values) if tensor is not None and is_array(tensor) else None
