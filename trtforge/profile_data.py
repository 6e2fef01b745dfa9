"""Optimisation profiles from the shapes of data: min and max of what was seen, and the most frequent as opt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet, ShapeRange
from trtforge.profile_text import missing_ranges
from trtforge.tensor import TensorSpec

Shapes = Mapping[str, Sequence[tuple[int, ...]]]
_Sizes = dict[tuple[str, int], int]


def profiles_from_data(
    shapes: Shapes,
    specs: Sequence[TensorSpec],
    *,
    values: Shapes | None = None,
    report: DimReport | None = None,
    has_whole_feeds: bool = False,
) -> ProfileSet:
    """One profile that spans the shapes seen in data; opt is the most frequent shape of all inputs together.

    The first axis of every input counts samples, so its min is 1 where the model leaves it open; not so where feeds are
    run whole. A dim that the graph derives from others gets the range that follows from theirs as well.

    Args:
        shapes: for each input, the shape of every batch.
        specs: the model's inputs.
        values: for each shape-tensor input, its values in every batch, flattened.
        report: what the graph says of the inputs' dims.
        has_whole_feeds: of the data.

    Raises:
        InputError: an open dimension of an input that the data does not have, data of several ranks, or a size that the
            graph does not take.
    """
    for spec in specs:
        _check_ranks(spec, shapes, specs, report)
    seen = {spec.name: list(zip(*shapes[spec.name], strict=True)) for spec in specs}
    low, high = (
        {(name, axis): pick(sizes) for name, axes in seen.items() for axis, sizes in enumerate(axes)}
        for pick in (min, max)
    )
    most = _most_frequent(shapes, specs, 0 if has_whole_feeds else 1)
    for spec in specs:
        for axis, dim in enumerate(spec.shape or ()):
            if isinstance(dim, int):
                low[spec.name, axis] = most[spec.name, axis] = high[spec.name, axis] = dim
        if not has_whole_feeds and seen[spec.name] and not isinstance((spec.shape or (None,))[0], int):
            low[spec.name, 0] = min(1, low[spec.name, 0])
    _follow_graph(report, low, most, high, has_whole_feeds)
    inputs = {
        spec.name: ShapeRange(
            *(tuple(sizes[spec.name, axis] for axis in range(len(seen[spec.name]))) for sizes in (low, most, high))
        )
        for spec in specs
    }
    spans = {name: _range_of_values(name, rows) for name, rows in (values or {}).items()}
    return ProfileSet((Profile("default", inputs, spans),), "data")


def _check_ranks(spec: TensorSpec, shapes: Shapes, specs: Sequence[TensorSpec], report: DimReport | None) -> None:
    found = shapes.get(spec.name)
    if not found:
        raise missing_ranges(specs, report)
    ranks = sorted({len(shape) for shape in found})
    if len(ranks) > 1:
        raise InputError(
            f"the data gives input '{spec.name}' different numbers of axes",
            f"it has arrays with {' and '.join(map(str, ranks))} axes",
            "save every sample with the same axes",
        )


def _most_frequent(shapes: Shapes, specs: Sequence[TensorSpec], first: int) -> _Sizes:
    """The sizes that occur together most often, which are known to fit each other; of several such the largest.

    Args:
        shapes: of the data.
        specs: the model's inputs.
        first: the first axis that belongs together; the ones before it count samples.
    """
    found: _Sizes = {}
    names = [spec.name for spec in specs]
    together = Counter(zip(*([shape[first:] for shape in shapes[name]] for name in names), strict=True))
    best = max(together, key=lambda sizes: (together[sizes], sizes))
    for name, sizes in zip(names, best, strict=True):
        counts = Counter(shape[0] for shape in shapes[name] if shape)
        batch = [max(counts, key=lambda size: (counts[size], size))] if first and counts else []
        found |= {(name, axis): size for axis, size in enumerate([*batch, *sizes])}
    return found


def _range_of_values(name: str, rows: Sequence[tuple[int, ...]]) -> ShapeRange:
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise InputError(
            f"the data gives input '{name}' different numbers of values: {', '.join(map(str, lengths))}",
            "its values decide shapes or a branch, so an engine takes one number of them",
            "save every sample with the same number of values",
        )
    counts = Counter(rows)
    columns = list(zip(*rows, strict=True))
    opt = max(counts, key=lambda row: (counts[row], row))
    return ShapeRange(tuple(map(min, columns)), opt, tuple(map(max, columns)))


def _follow_graph(report: DimReport | None, low: _Sizes, most: _Sizes, high: _Sizes, has_whole_feeds: bool) -> None:
    """Apply what the graph fixes or derives, in place.

    Raises:
        InputError: the data has a size that the graph does not take.
    """
    if report is None:
        return
    for fact in report.dims:
        axes = [axis for axis in fact.axes if axis in low]
        counts_samples = not has_whole_feeds and any(axis == 0 for _, axis in axes)
        if fact.kind == "fixed" and fact.suggestion is not None:
            for axis in axes:
                if counts_samples:
                    low[axis] = most[axis] = high[axis] = fact.suggestion
                for size in (low[axis], high[axis]):
                    if not fact.takes(size):
                        raise _wrong_size(fact, axis, size)
    for fact in report.following(fact.name for fact in report.dims if fact.kind != "derived"):
        terms = {name: report.dim(name).axes[0] for name, _ in fact.terms}
        if all(axis in low for axis in terms.values()):
            for sizes, pick in ((low, min), (high, max)):
                total = fact.total({name: sizes[axis] for name, axis in terms.items()})
                for axis in fact.axes:
                    sizes[axis] = pick(sizes[axis], total)


def _wrong_size(fact: DimFact, axis: tuple[str, int], size: int) -> InputError:
    return InputError(
        f"the data has size {size} on axis {axis[1]} of input '{axis[0]}'",
        f"the graph takes {fact.limits} there: {fact.reason}",
        f"save the data with {fact.suggestion} there",
    )
