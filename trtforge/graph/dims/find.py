"""What a graph says of its open dimensions: equal, fixed, a multiple, at most, or free. Runs in native.py's child.

The method is trial: every open axis gets a size of its own, and the first node that cannot take them tells which two
must be equal, or which one is fixed (probe.py). Once sizes are found that go through, each dimension is varied alone;
what goes through and what does not gives its limits. A name that the model gives to several axes ties them from the
start, unless the graph contradicts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from trtforge.graph.dims import limits as dim_limits
from trtforge.graph.dims.probe import ShapeProbe
from trtforge.graph.dims.shape_inputs import find_shape_inputs
from trtforge.graph.dims.trial import OutOfWorkError, StuckError, Trial, TrialDim
from trtforge.profile import DimFact, DimReport

# What the name of a decoder's cache has in it.
_CACHE_WORDS = ("past", "cache", "mems")


def analyse_dims(model: onnx.ModelProto, *, find_limits: bool = True) -> DimReport:
    """What a model says of its inputs' open dimensions.

    Args:
        model: normalised; its weights may have no data.
        find_limits: vary every dimension; otherwise only what is equal, fixed or derived is found.
    """
    shape_inputs = find_shape_inputs(model)
    stored = {tensor.name for tensor in model.graph.initializer}
    ports = {port.name: port for port in model.graph.input if port.name not in stored}
    shapes = {
        name: [_dim_of(dim) for dim in port.type.tensor_type.shape.dim]
        for name, port in ports.items()
        if port.type.tensor_type.HasField("shape")
    }
    probe = ShapeProbe(model)
    note = ""
    for is_tied in (True, False):
        analysis = Trial(probe, shapes, is_tied)
        try:
            analysis.solve()
            if find_limits:
                dim_limits.find_limits(analysis)
        except OutOfWorkError:
            note = "the graph is too large to examine every dimension"
        except StuckError as err:
            if is_tied and analysis.has_shared_names:
                continue
            note = f"no sizes were found that node {err.conflict.node!r} ({err.conflict.op}) takes: {err.conflict.why}"
        break
    facts = _facts(analysis)
    return DimReport(facts, shape_inputs, _find_caches(facts, analysis.ranks), note)


def _dim_of(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return dim.dim_param or None


def _facts(trial: Trial) -> tuple[DimFact, ...]:
    """What was found, with names."""
    names = _names(trial.dims)
    return tuple(
        DimFact(
            name=names[id(dim)],
            axes=tuple(dim.axes),
            kind=dim.kind,  # type: ignore[arg-type]
            low=dim.low,
            high=dim.high,
            multiple=dim.multiple,
            suggestion=dim.suggestion,
            terms=tuple((names[id(term)], factor) for term, factor in dim.terms),
            offset=dim.offset,
            reason=dim.reason,
        )
        for dim in trial.dims
    )


def _names(dims: Sequence[TrialDim]) -> dict[int, str]:
    """A name for every dim: the model's, `batch` for the first axis, else the input's with the axis."""
    names: dict[int, str] = {}
    for dim in dims:
        name, axis = dim.axes[0]
        own = f"{''.join(c if c.isalnum() and c.isascii() else '_' for c in name).strip('_')}_{axis}"
        own = own if not own[0].isdigit() else f"dim_{own}"
        is_batch = all(axis == 0 for _, axis in dim.axes) and dim.kind == "free"
        choices = [dim.label, "batch" if is_batch else None, own]
        taken = set(names.values())
        names[id(dim)] = next((c for c in choices if c and c not in taken), f"{own}_{len(taken)}")
    return names


def _find_caches(facts: Sequence[DimFact], ranks: Mapping[str, int]) -> dict[str, str]:
    """Inputs of rank 3 and more, named as a cache, with an open axis that counts steps: not the batch, not derived."""
    caches: dict[str, str] = {}
    for fact in facts:
        if fact.kind != "free" or any(axis == 0 for _, axis in fact.axes):
            continue
        for name, _ in fact.axes:
            if ranks[name] >= 3 and any(word in name.lower() for word in _CACHE_WORDS):
                caches.setdefault(name, fact.name)
    return caches
