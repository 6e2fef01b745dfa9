"""A traced program as an ONNX file whose bytes depend on the model alone; in the child process only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from trtforge.errors import InputError
from trtforge.export.repair import repair_rotary_embeddings
from trtforge.export.torch_model import TorchModel
from trtforge.export_info import DimInfo

# Bytes of weights above which they go into a file of their own: protobuf ends at 2 GiB.
EXTERNAL_BYTES = 2**30
_SCOPES = "pkg.torch.onnx.name_scopes"
_UNBOUNDED = 2**31


def write_onnx(model: TorchModel, program: Any, path: Path, opset: int) -> None:
    """Convert a traced program and save it, with external data beside it where it is large.

    Raises:
        InputError: an operator of the model has no ONNX form.
    """
    try:
        with torch.no_grad():
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=opset,
                input_names=[item.name for item in model.inputs],
                output_names=model.output_names,
                verbose=False,
            )
    except Exception as err:
        raise _unconvertible(err, model) from err
    assert converted is not None
    graph = converted.model.graph
    repair_rotary_embeddings(graph)
    _name_dims(graph, symbols(model, program))
    _name_nodes(graph)
    _shorten_weights(graph)
    # The exporter notes the source file of every node; those paths would make the bytes depend on the machine.
    ClearMetadataAndDocStringPass()(converted.model)
    num_bytes = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    external = f"{path.name}.data" if num_bytes > EXTERNAL_BYTES else None
    onnx_ir.save(converted.model, path, external_data=external)


def symbols(model: TorchModel, program: Any) -> dict[str, str]:
    """torch's symbol of every open dim -> the name that it is to have."""
    names: dict[str, str] = {}
    for item, shape in zip(model.inputs, input_shapes(program), strict=True):
        for dim, size in zip(item.dims, shape, strict=True):
            for symbol in getattr(getattr(size, "node", None), "expr", size).free_symbols if _is_open(size) else ():
                names.setdefault(str(symbol), dim if isinstance(dim, str) else str(symbol))
    return names


def dim_ranges(model: TorchModel, program: Any) -> dict[str, DimInfo]:
    """The sizes that the traced program takes along every named dim.

    torch's own lower bound of 2 is no property of the model, so it is given as 1.
    """
    by_symbol = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    ranges: dict[str, DimInfo] = {}
    for symbol, name in symbols(model, program).items():
        bounds = by_symbol.get(symbol)
        low, high = (2, None) if bounds is None else (_as_int(bounds.lower), _as_int(bounds.upper))
        before = ranges.get(name, DimInfo(min=0, max=None))
        least = max(before.min, 1 if low is None or low <= 2 else low)
        caps = (before.max, high, model.caps.get(name))
        most = min((bound for bound in caps if bound is not None), default=None)
        ranges[name] = DimInfo(min=least, max=most)
    return ranges


def input_shapes(program: Any) -> list[tuple[Any, ...]]:
    """Shapes of the user's inputs in the traced program."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [tuple(nodes[name].meta["val"].shape) for name in program.graph_signature.user_inputs]


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _as_int(bound: Any) -> int | None:
    try:
        value = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return value if value < _UNBOUNDED else None


def _name_dims(graph: Any, names: Mapping[str, str]) -> None:
    """Give dims the user's names, in every shape that the graph states."""
    pattern = re.compile(r"[^\W\d]\w*")
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, onnx_ir.SymbolicDim) and dim.value is not None:
                text = pattern.sub(lambda found: names.get(found.group(), found.group()), str(dim.value))
                value.shape[axis] = onnx_ir.SymbolicDim(text)


def _name_nodes(graph: Any) -> None:
    """Name nodes by their module and operator, as in `/encoder/layer/0/output/dense/MatMul`."""
    used: Counter[str] = Counter()
    for node in graph:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]")) or [""]
        modules = [scope for scope in scopes[:-1] if scope.startswith("module")]
        path = modules[-1].removeprefix("module").replace(".", "/") if modules else ""
        name = f"{path}/{node.op_type}"
        node.name = name if used[name] == 0 else f"{name}_{used[name]}"
        used[name] += 1


def _shorten_weights(graph: Any) -> None:
    """Give weights the names of the user's state dict, without the wrapper's prefix."""
    taken = {value.name for value in (*graph.inputs, *(output for node in graph for output in node.outputs))}
    for value in list(graph.initializers.values()):
        short = value.name.removeprefix("module.")
        if short != value.name and short not in taken and short not in graph.initializers:
            value.name = short


def _unconvertible(err: Exception, model: TorchModel) -> InputError:
    texts, cause = [], err
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    joined = " ".join(" ".join(texts).split())
    ops = list(dict.fromkeys(re.findall(r"No ONNX function found for <OpOverload\(op='([\w:.]+)'", joined)))
    if ops:
        return InputError(
            f"{model.architecture} uses {', '.join(op.replace('::', '.') for op in ops[:4])}",
            "torch's ONNX exporter has no translation of it",
            "write it with other operators, or leave that part out of the module",
        )
    return InputError(
        f"torch's ONNX exporter cannot convert {model.architecture}", texts[-1].strip()[:300], "export it another way"
    )
