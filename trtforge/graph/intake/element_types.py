"""Element types that TensorRT does not compute in: float64 becomes float32, small and unsigned integers int32 or int64.

TensorRT-RTX 1.7 reads float64 and computes in float32, silently: here it is written into the graph, so that what is
verified is what is built. Inputs and outputs of the model keep their type, with a Cast beside them; the engine's own
are float32 then. Codes of quantization keep theirs: a group of tensors is left alone as soon as one operator touches it
that is not on the list. Integers wrap as they would have in their own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtforge.graph.edit import all_graphs, all_nodes, is_array, is_onnx_op, replace_uses, subgraphs_of
from trtforge.graph.names import UniqueNames
from trtforge.graph.signature import tensor_dtype

Dtype = np.dtype[Any]

FLOAT64, FLOAT32 = np.dtype(np.float64), np.dtype(np.float32)
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_WIDER: dict[Dtype, Dtype] = {
    **{np.dtype(kind): _INT32 for kind in (np.int8, np.uint8, np.int16, np.uint16)},
    **{np.dtype(kind): _INT64 for kind in (np.uint32, np.uint64)},
}
# Operators that give values of their inputs, or compare them: no result leaves the range of the type.
# fmt: off
_RANGE_KEEPING = frozenset([
    "Cast", "Clip", "Compress", "Concat", "ConstantOfShape", "DepthToSpace", "Equal", "Expand", "Flatten", "Gather",
    "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min",
    "NonZero", "Pad", "ReduceMax", "ReduceMin", "Reshape", "ScatterElements", "ScatterND", "Shape", "Sign", "Size",
    "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
])
# fmt: on


def narrow_types(graph: gs.Graph) -> list[str]:
    """Rewrite the types in place, subgraphs included; a second call finds nothing to do.

    Args:
        graph: sorted, with inferred types.

    Returns:
        What was done, in sentences.
    """
    stated = {tensor.dtype for node in all_nodes(graph) for tensor in (*node.inputs, *node.outputs)}
    types = {tensor_dtype(dtype) for dtype in stated}
    notes = _Narrower(graph, {FLOAT64: FLOAT32}).run() if FLOAT64 in types else []
    return notes + (_Narrower(graph, _WIDER).run() if types & _WIDER.keys() else [])


class _Narrower:
    """One run over the types that are keys of `targets`, which become its values."""

    def __init__(self, graph: gs.Graph, targets: Mapping[Dtype, Dtype]) -> None:
        self.graph = graph
        self._targets = targets
        self._names: UniqueNames | None = None
        self._added: dict[int, list[gs.Node]] = {}
        self._ports = {id(tensor) for tensor in [*graph.inputs, *graph.outputs]}
        self._group: dict[int, int] = {}
        self._seen: dict[int, gs.Tensor] = {}

    def run(self) -> list[str]:
        nodes = [node for node in all_nodes(self.graph) if self._touches(node)]
        nodes = [node for node in nodes if not self._is_border(node)]
        chosen = self._choose(nodes) if nodes else {}
        if not chosen:
            return []
        self._names = UniqueNames(self.graph)
        changed = [node for node in nodes if any(id(t) in chosen for t in (*node.inputs, *node.outputs))]
        for node in changed:
            self._change_attributes(node, chosen)
        ports = self._add_borders(chosen)
        for tensor in chosen.values():
            self._change_tensor(tensor)
        self._insert()
        names = sorted({old.name for old in (tensor_dtype(t.dtype) for t in ports) if old})
        what = "float64 is computed in float32" if FLOAT64 in self._targets else "small integers are held as wider ones"
        kept = "keep their type"
        if FLOAT64 in self._targets:
            kept += " in model.onnx and are float32 in the engine"
        where = f"; {', '.join(repr(t.name) for t in ports[:4])} ({', '.join(names)}) {kept}" if ports else ""
        return [f"{what} in {len(changed)} nodes, because TensorRT does not compute in it{where}"]

    def _wider(self, tensor: gs.Tensor) -> Dtype | None:
        if isinstance(tensor, gs.Constant) and not is_array(tensor):
            return None
        dtype = tensor_dtype(tensor.dtype)
        return self._targets.get(dtype) if dtype is not None else None

    def _touches(self, node: gs.Node) -> bool:
        return bool(self._tensors_of(node))

    def _tensors_of(self, node: gs.Node) -> list[gs.Tensor]:
        """What a node reads and makes of the types to change; the ports of its bodies have the types of its own."""
        ports = [port for body in subgraphs_of(node) for port in (*body.inputs, *body.outputs)]
        return [tensor for tensor in (*node.inputs, *node.outputs, *ports) if self._wider(tensor) is not None]

    def _is_border(self, node: gs.Node) -> bool:
        """True for a Cast between a port of the model and a type that is kept: nothing is left to do there."""
        if node.op != "Cast":
            return False
        ends = (node.inputs[0], node.outputs[0])
        return any(id(end) in self._ports for end in ends) and all(
            self._wider(end) is None or id(end) in self._ports for end in ends
        )

    def _choose(self, nodes: list[gs.Node]) -> dict[int, gs.Tensor]:
        """The tensors to change, by identity: groups that only operators of the list touch."""
        spoiled: set[int] = set()
        for node in nodes:
            tensors = self._tensors_of(node)
            for tensor in tensors:
                self._seen.setdefault(id(tensor), tensor)
            if node.op != "Cast":
                for tensor in tensors[1:]:
                    self._group[self._root(tensors[0])] = self._root(tensor)
            if not self._is_taken(node):
                spoiled.update(id(tensor) for tensor in tensors)
        for tensor in [*self._seen.values()]:
            # What a node outside the list reads or makes, an already finished border aside.
            users = [user for user in (*tensor.inputs, *tensor.outputs) if not self._is_border(user)]
            if not all(self._is_taken(user) for user in users):
                spoiled.add(id(tensor))
        bad = {self._root(self._seen[key]) for key in spoiled}
        return {key: tensor for key, tensor in self._seen.items() if self._root(tensor) not in bad}

    def _is_taken(self, node: gs.Node) -> bool:
        if FLOAT64 in self._targets:
            return is_onnx_op(node)
        reduction = node.attrs.get("reduction", "none")
        return is_onnx_op(node) and node.op in _RANGE_KEEPING and reduction == "none"

    def _root(self, tensor: gs.Tensor) -> int:
        key = id(tensor)
        while self._group.get(key, key) != key:
            self._group[key] = self._group.get(self._group[key], self._group[key])
            key = self._group[key]
        return key

    def _change_attributes(self, node: gs.Node, chosen: dict[int, gs.Tensor]) -> None:
        result = node.outputs[0] if node.outputs else None
        if result is None or id(result) not in chosen:
            return
        old = tensor_dtype(result.dtype)
        assert old is not None
        for name in ("to", "dtype"):
            if name in node.attrs:
                node.attrs[name] = _onnx_type(self._targets[old])
        value = node.attrs.get("value")
        if isinstance(value, gs.Constant) and value.values.dtype == old:
            node.attrs["value"] = gs.Constant("", _converted(value.values, self._targets[old]))
        source = tensor_dtype(node.inputs[0].dtype) if node.op == "Cast" else None
        if source is not None and source.kind in "iu" and old.kind in "iu" and not _contains(old, source):
            self._wrap(node, result, old)

    def _wrap(self, node: gs.Node, result: gs.Variable, old: Dtype) -> None:
        """Make the result of a Cast to a smaller integer wrap around."""
        wide, bits = self._targets[old], 8 * old.itemsize
        if bits == 64:
            return
        low = int(np.iinfo(old).min)
        tensor: gs.Variable = self._variable(result, wide, "unwrapped")
        node.outputs[0] = tensor
        steps = [("Sub", low), ("Mod", 2**bits), ("Add", low)] if low else [("Mod", 2**bits)]
        for index, (op, number) in enumerate(steps):
            is_last = index == len(steps) - 1
            output = result if is_last else self._variable(result, wide, "wrapped")
            self._add(node, op, [tensor, self._constant(number, wide)], [output])
            tensor = output

    def _add_borders(self, chosen: dict[int, gs.Tensor]) -> list[gs.Tensor]:
        """Put Casts between the model's ports, which keep their type, and what is changed; gives those ports."""
        ports = []
        for port in {id(port): port for port in [*self.graph.inputs, *self.graph.outputs]}.values():
            if id(port) not in chosen or isinstance(port, gs.Constant):
                continue
            del chosen[id(port)]
            ports.append(port)
            old = tensor_dtype(port.dtype)
            assert old is not None
            inner = self._variable(port, self._targets[old], "inner")
            if port.inputs:
                maker = port.inputs[0]
                index = next(place for place, tensor in enumerate(maker.outputs) if tensor is port)
                replace_uses(port, inner)
                maker.outputs[index] = inner
                self._add(maker, "Cast", [inner], [port], to=_onnx_type(old))
            else:
                replace_uses(port, inner)
                self._add(None, "Cast", [port], [inner], to=_onnx_type(self._targets[old]))
        return ports

    def _change_tensor(self, tensor: gs.Tensor) -> None:
        wider = self._wider(tensor)
        if wider is None:
            return
        if isinstance(tensor, gs.Constant):
            tensor.values = _converted(tensor.values, wider)
        else:
            tensor.dtype = wider

    def _variable(self, like: gs.Tensor, dtype: Dtype, label: str) -> gs.Variable:
        assert self._names is not None
        return gs.Variable(self._names.tensor(f"{like.name}_{label}"), dtype, like.shape)

    def _constant(self, number: int, dtype: Dtype) -> gs.Constant:
        assert self._names is not None
        return gs.Constant(self._names.tensor("number"), np.array(number, dtype))

    def _add(self, anchor: gs.Node | None, op: str, inputs: list[Any], outputs: list[Any], **attrs: Any) -> None:
        assert self._names is not None
        node = gs.Node(op, self._names.node(f"{outputs[0].name}_{op}"), attrs, inputs, outputs)
        self._added.setdefault(id(anchor), []).append(node)

    def _insert(self) -> None:
        first = self._added.pop(id(None), [])
        for holder in all_graphs(self.graph):
            nodes = first if holder is self.graph else []
            for node in holder.nodes:
                nodes.append(node)
                nodes += self._added.get(id(node), [])
            holder.nodes = nodes


def _contains(wide: Dtype, narrow: Dtype) -> bool:
    """True when every value of one integer type is one of the other."""
    outer, inner = np.iinfo(wide), np.iinfo(narrow)
    return outer.min <= inner.min and outer.max >= inner.max


def _converted(values: np.ndarray[Any, Any], dtype: Dtype) -> np.ndarray[Any, Any]:
    """Values in another type; finite ones stay finite."""
    if dtype == FLOAT32:
        largest = np.finfo(np.float32).max
        clipped = np.where(np.isfinite(values), np.clip(values, -largest, largest), values)
        return clipped.astype(np.float32)
    return values.astype(dtype)


def _onnx_type(dtype: Dtype) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype))
