"""Remove the transposes that converters leave between operators that do not care about the order of axes.

    merged   a Transpose of a Transpose is one Transpose, or none.
    moved    Between two convolutions of a converted NHWC model stand Transpose, Relu, Add ..., Transpose. The operators
             in between form a region. Computed in the order of axes that its incoming transposes start from, the region
             needs none of them, and those behind it that turn back go too. That is done where fewer are left.

Along an axis, Concat, Softmax, Split, Pad and reductions belong to a region as well: their axes are renumbered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.graph.edit import InputEdits, all_graphs, is_array, is_onnx_op
from trtforge.graph.names import UniqueNames
from trtforge.graph.passes.cleanup import give_output

Perm = tuple[int, ...]

# fmt: off
_ELEMENTWISE_OPS = frozenset([
    "Abs", "Add", "And", "Cast", "Ceil", "Celu", "Clip", "Cos", "DequantizeLinear", "Div", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Swish", "Tanh", "ThresholdedRelu", "Where", "Xor",
])
_AXIS_OPS = frozenset(["Concat", "LogSoftmax", "Softmax", "Split"])
_REDUCE_OPS = frozenset([
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare",
])
# Operators whose inputs after the first are no tensors in the order of axes.
_ONE_INPUT_OPS = _REDUCE_OPS | {"Clip", "DequantizeLinear", "Pad", "QuantizeLinear", "Split"}
# fmt: on
_DEFAULT_AXES = {"Concat": 0, "Split": 0}


def remove_transposes(graph: gs.Graph) -> int:
    """Merge transposes and move them out of regions, in place, subgraphs included.

    Args:
        graph: sorted, with inferred types.

    Returns:
        How many changes were made; transposes that nothing reads any more are left for dead node removal.
    """
    num_changed = 0
    names: UniqueNames | None = None
    for current in all_graphs(graph):
        if not any(_is_transpose(node) for node in current.nodes):
            continue
        num_changed += _merge(current)
        names = names or UniqueNames(graph)
        for region in _regions(current):
            num_changed += region.move_transposes(names)
    return num_changed


def _is_transpose(node: gs.Node) -> bool:
    return node.op == "Transpose" and is_onnx_op(node)


def _perm(node: gs.Node) -> Perm | None:
    """The permutation of a Transpose; None where the rank is needed and unknown, and for what is none."""
    if "perm" in node.attrs:
        perm = tuple(int(axis) for axis in node.attrs["perm"])
        return perm if sorted(perm) == list(range(len(perm))) else None
    shape = node.inputs[0].shape
    return None if shape is None else tuple(reversed(range(len(shape))))


def _inverse(perm: Perm) -> Perm:
    return tuple(int(axis) for axis in np.argsort(perm))


def _merge(graph: gs.Graph) -> int:
    """Let each Transpose of a Transpose read the first one's source."""
    num_changed = 0
    edits = InputEdits()
    sources: dict[int, tuple[gs.Tensor, Perm]] = {}
    for node in graph.nodes:
        perm = _perm(node) if _is_transpose(node) else None
        if perm is None:
            continue
        source, first = sources.get(id(node.inputs[0]), (node.inputs[0], tuple(range(len(perm)))))
        if len(first) != len(perm):  # the model gives one tensor two ranks
            continue
        perm = tuple(first[axis] for axis in perm)
        is_merged, is_nothing = source is not node.inputs[0], perm == tuple(range(len(perm)))
        num_changed += is_merged or is_nothing
        if is_merged:
            edits.replace(node, 0, source)
        if is_nothing:
            node.op = "Identity"
            node.attrs.clear()
        else:
            node.attrs["perm"] = list(perm)
            sources[id(node.outputs[0])] = (source, perm)
    edits.apply()
    return num_changed


def _rank(tensor: gs.Tensor) -> int | None:
    return None if tensor.shape is None else len(tensor.shape)


def _data_inputs(node: gs.Node) -> list[tuple[int, gs.Tensor]]:
    """The inputs of a region's node that are in its order of axes, with their indices."""
    inputs = list(enumerate(node.inputs))
    return inputs[:1] if node.op in _ONE_INPUT_OPS else [(i, tensor) for i, tensor in inputs if tensor.name]


def _is_movable(node: gs.Node) -> bool:
    """Whether a node can belong to a region."""
    if not is_onnx_op(node) or not node.outputs or not node.inputs:
        return False
    if node.op not in _ELEMENTWISE_OPS | _AXIS_OPS | _REDUCE_OPS and node.op != "Pad":
        return False
    rank = _rank(node.outputs[0])
    if rank is None or rank < 2:
        return False
    for _, tensor in _data_inputs(node):
        if isinstance(tensor, gs.Constant):
            if not is_array(tensor) or tensor.values.ndim > rank:
                return False
        elif _rank(tensor) != rank:
            return False
    if node.op in _ONE_INPUT_OPS and not _has_fixed_parameters(node, rank):
        return False
    return all(-rank <= axis < rank for axis in _axes(node))


def _axes(node: gs.Node) -> list[int]:
    """The axes that a node of a region names, as it counts them."""
    if node.op in _REDUCE_OPS:
        return [int(axis) for axis in node.inputs[1].values.reshape(-1)]
    return [int(node.attrs.get("axis", _DEFAULT_AXES.get(node.op, -1)))] if node.op in _AXIS_OPS else []


def _has_fixed_parameters(node: gs.Node, rank: int) -> bool:
    """Whether the other inputs of a node with one data input can be kept or renumbered."""
    others = [tensor for tensor in node.inputs[1:] if tensor.name]
    if node.op in ("QuantizeLinear", "DequantizeLinear", "Clip"):
        return all(is_array(tensor) and tensor.values.size == 1 for tensor in others)
    if node.op == "Split":
        return True
    if node.op == "Pad":
        has_axes = len(node.inputs) > 3 and bool(node.inputs[3].name)
        return not has_axes and is_array(node.inputs[1]) and node.inputs[1].values.size == 2 * rank
    return bool(node.attrs.get("keepdims", 1)) and len(others) == 1 and is_array(others[0])


def _regions(graph: gs.Graph) -> Iterator[_Region]:
    """The connected sets of movable nodes, in node order."""
    movable = [node for node in graph.nodes if _is_movable(node)]
    parents = list(range(len(movable)))

    def find(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    producers = {id(tensor): index for index, node in enumerate(movable) for tensor in node.outputs}
    for index, node in enumerate(movable):
        for _, tensor in _data_inputs(node):
            if id(tensor) in producers:
                parents[find(index)] = find(producers[id(tensor)])
    members: dict[int, list[gs.Node]] = {}
    for index, node in enumerate(movable):
        members.setdefault(find(index), []).append(node)
    for nodes in members.values():
        yield _Region(graph, nodes)


class _Region:
    """Nodes that can be computed in another order of axes."""

    def __init__(self, graph: gs.Graph, nodes: list[gs.Node]) -> None:
        self._graph = graph
        self._nodes = nodes
        self._members = {id(node) for node in nodes}
        self._made = {id(tensor) for node in nodes for tensor in node.outputs}

    def move_transposes(self, names: UniqueNames) -> int:
        """Compute the region in another order of axes where that leaves fewer transposes; 1 if so, else 0."""
        incoming = Counter(perm for tensor in self._sources() if (perm := _perm_behind(tensor)) is not None)
        if not incoming:
            return 0
        outputs = {id(tensor) for tensor in self._graph.outputs}
        best = max(incoming, key=lambda perm: (self._gain(perm, outputs), incoming[perm]))
        if self._gain(best, outputs) <= 0:
            return 0
        _Move(self._graph, self._nodes, best, names).run(self._made, self._members, outputs)
        return 1

    def _sources(self) -> list[gs.Tensor]:
        """Tensors that enter the region, each once."""
        tensors = {
            id(tensor): tensor
            for node in self._nodes
            for _, tensor in _data_inputs(node)
            if id(tensor) not in self._made and not isinstance(tensor, gs.Constant)
        }
        return list(tensors.values())

    def _gain(self, perm: Perm, outputs: set[int]) -> int:
        """How many transposes go, less how many come."""
        gain = 0
        for tensor in self._sources():
            if _perm_behind(tensor) != perm:
                gain -= 1
            elif id(tensor) not in outputs and all(id(reader) in self._members for reader in tensor.outputs):
                gain += 1
        turned_back = _inverse(perm)
        for node in self._nodes:
            for tensor in node.outputs:
                readers = [reader for reader in tensor.outputs if id(reader) not in self._members]
                gain += sum(_is_transpose(reader) and _perm(reader) == turned_back for reader in readers)
                gain -= id(tensor) in outputs or not all(_is_transpose(reader) for reader in readers)
        return gain


def _perm_behind(tensor: gs.Tensor) -> Perm | None:
    """The permutation that a tensor comes out of."""
    return _perm(tensor.inputs[0]) if tensor.inputs and _is_transpose(tensor.inputs[0]) else None


class _Move:
    """Rewrites one region for one permutation."""

    def __init__(self, graph: gs.Graph, nodes: list[gs.Node], perm: Perm, names: UniqueNames) -> None:
        self._graph = graph
        self._nodes = nodes
        self._perm = perm
        self._inverse = _inverse(perm)
        self._names = names
        self._edits = InputEdits()
        self._turned: dict[int, gs.Tensor] = {}
        self._before: dict[int, list[gs.Node]] = {}
        self._after: dict[int, list[gs.Node]] = {}

    def run(self, made: set[int], members: set[int], outputs: set[int]) -> None:
        """Rewrite inputs, parameters and results of every node, then place the new transposes."""
        for node in self._nodes:
            for index, tensor in _data_inputs(node):
                if id(tensor) not in made:
                    self._edits.replace(node, index, self._turn(tensor, node))
            self._renumber(node)
        for node in self._nodes:
            for index, tensor in enumerate(node.outputs):
                if tensor.name:
                    self._leave(node, index, members, outputs)
        self._edits.apply()
        placed = []
        for node in self._graph.nodes:
            placed += [*self._before.get(id(node), ()), node, *self._after.get(id(node), ())]
        self._graph.nodes = placed

    def _transpose(self, source: gs.Tensor, result: gs.Tensor, perm: Sequence[int]) -> gs.Node:
        return gs.Node(
            "Transpose", self._names.node(f"{result.name}_transpose"), {"perm": list(perm)}, [source], [result]
        )

    def _variable(self, like: gs.Tensor, suffix: str, perm: Sequence[int]) -> gs.Variable:
        shape = None if like.shape is None else [like.shape[axis] for axis in perm]
        return gs.Variable(self._names.tensor(f"{like.name}_{suffix}"), like.dtype, shape)

    def _turn(self, tensor: gs.Tensor, node: gs.Node) -> gs.Tensor:
        """A tensor from outside in the region's new order of axes."""
        if id(tensor) in self._turned:
            return self._turned[id(tensor)]
        if isinstance(tensor, gs.Constant):
            turned = self._turn_constant(tensor)
        elif _perm_behind(tensor) == self._perm:
            turned = tensor.inputs[0].inputs[0]
        else:
            turned = self._variable(tensor, "turned", self._inverse)
            self._before.setdefault(id(node), []).append(self._transpose(tensor, turned, self._inverse))
        self._turned[id(tensor)] = turned
        return turned

    def _turn_constant(self, constant: gs.Constant) -> gs.Constant:
        if constant.values.size == 1:
            return constant
        values = constant.values.reshape((1,) * (len(self._perm) - constant.values.ndim) + constant.values.shape)
        turned = np.ascontiguousarray(np.transpose(values, self._inverse))
        return gs.Constant(self._names.tensor(f"{constant.name}_turned"), turned)

    def _renumber(self, node: gs.Node) -> None:
        """Axes of the old order become those of the new one."""
        rank = len(self._perm)
        if node.op in _AXIS_OPS:
            node.attrs["axis"] = self._perm[_axes(node)[0]]
        elif node.op in _REDUCE_OPS:
            axes = np.array(sorted(self._perm[axis] for axis in _axes(node)), np.int64)
            self._edits.replace(node, 1, gs.Constant(self._names.tensor(f"{node.name}_axes"), axes))
        elif node.op == "Pad":
            pads = node.inputs[1].values.reshape(2, rank)[:, list(self._inverse)].reshape(-1)
            self._edits.replace(node, 1, gs.Constant(self._names.tensor(f"{node.name}_pads"), pads))

    def _leave(self, node: gs.Node, index: int, members: set[int], outputs: set[int]) -> None:
        """Give what is outside the region a result in the old order of axes."""
        tensor = node.outputs[index]
        readers = {id(reader): reader for reader in tensor.outputs if id(reader) not in members}.values()
        if id(tensor) in outputs:
            inner = self._variable(tensor, "inner", self._inverse)
            for reader in {id(reader): reader for reader in tensor.outputs if id(reader) in members}.values():
                self._replace_all(reader, tensor, inner)
            give_output(node, index, inner)
            self._after.setdefault(id(node), []).append(self._transpose(inner, tensor, self._perm))
            return
        old_shape = tensor.shape
        outside: gs.Variable | None = None
        for reader in readers:
            if _is_transpose(reader):
                # A merge with what the region no longer does.
                reader.attrs["perm"] = [self._perm[axis] for axis in _perm(reader) or ()]
                continue
            if outside is None:
                outside = gs.Variable(self._names.tensor(f"{tensor.name}_transposed"), tensor.dtype, old_shape)
                self._after.setdefault(id(node), []).append(self._transpose(tensor, outside, self._perm))
            self._replace_all(reader, tensor, outside)
        tensor.shape = None if old_shape is None else [old_shape[axis] for axis in self._inverse]

    def _replace_all(self, reader: gs.Node, old: gs.Tensor, new: gs.Tensor) -> None:
        for index, tensor in enumerate(reader.inputs):
            if tensor is old:
                self._edits.replace(reader, index, new)
