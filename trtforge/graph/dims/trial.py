"""Find sizes of a graph's open dimensions that go through, and with them what has to be equal, fixed or a sum."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from trtforge.graph.dims.probe import Conflict, ShapeProbe
from trtforge.graph.dims.probe_rules import ELEMENTWISE, Shape
from trtforge.graph.names import is_dim_name

Axis = tuple[str, int]
Candidates = Callable[[Conflict, Sequence["TrialDim"]], Iterator[int]]

# Sizes to start from: distinct, so that a size in a conflict tells where it came from, and below most tables' ends.
_FIRST_SIZES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)
# Added to a size to see what moves with it: little, so that no end is passed, or enough to show behind strides of 32.
_SMALL_STEP, _LARGE_STEP = 2, 64
# Largest size that a search between two sizes ends at, and sizes that are tried where nothing tells where to look.
_SEARCH_HIGH = 2**14
_BRUTE = (*(32 * n for n in range(1, 33)), *(2**n for n in range(5, 18)), *range(1, 513))
# Node visits of one analysis: about 10 s at most.
_WORK = 500_000


class OutOfWorkError(Exception):
    """The analysis took too long."""


class StuckError(Exception):
    """No sizes were found that go through."""

    def __init__(self, conflict: Conflict) -> None:
        super().__init__(conflict.why)
        self.conflict = conflict


@dataclasses.dataclass(slots=True)
class TrialDim:
    """One dimension while it is examined: its axes, and what is known."""

    axes: list[Axis]
    label: str | None
    size: int
    terms: list[tuple[TrialDim, int]] = dataclasses.field(default_factory=list)
    offset: int = 0
    kind: str = "free"
    low: int = 1
    high: int | None = None
    multiple: int = 1
    suggestion: int | None = None
    # One of several whose sizes were found together, and are not the only ones.
    is_alike: bool = False
    reason: str = ""

    def value(self, sizes: Mapping[int, int]) -> int:
        """The size, where the dims with these ids have other sizes."""
        if self.kind == "derived":
            return self.offset + sum(factor * dim.value(sizes) for dim, factor in self.terms)
        return sizes.get(id(self), self.size)


def is_plain_name(name: str | None) -> bool:
    """Whether a dim's name says something and can be one in a profile file."""
    return name is not None and is_dim_name(name) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


class Trial:
    """The trial of one model's shapes."""

    def __init__(self, probe: ShapeProbe, shapes: Mapping[str, list[int | str | None]], is_tied: bool) -> None:
        self._probe = probe
        self._shapes = shapes
        self._work = _WORK
        self.ranks = {name: len(shape) for name, shape in shapes.items()}
        self.dims: list[TrialDim] = []
        named: dict[str, TrialDim] = {}
        self.has_shared_names = False
        for name, shape in shapes.items():
            for axis, dim in enumerate(shape):
                if isinstance(dim, int):
                    continue
                label = dim if is_plain_name(dim) else None
                if is_tied and label in named:
                    named[label].axes.append((name, axis))
                    self.has_shared_names = True
                    continue
                size = _FIRST_SIZES[len(self.dims)] if len(self.dims) < len(_FIRST_SIZES) else 107 + len(self.dims)
                self.dims.append(TrialDim([(name, axis)], label, size))
                if label is not None:
                    named.setdefault(label, self.dims[-1])

    def run(self, sizes: Mapping[int, int] | None = None) -> Conflict | None:
        """The first conflict where some dims, by id, have other sizes than now."""
        self._work -= self._probe.num_nodes
        if self._work < 0:
            raise OutOfWorkError
        changed = sizes or {}
        shapes = {name: [d if isinstance(d, int) else 0 for d in shape] for name, shape in self._shapes.items()}
        for dim in self.dims:
            size = dim.value(changed)
            for name, axis in dim.axes:
                shapes[name][axis] = size
        return self._probe.run({name: tuple(shape) for name, shape in shapes.items()})

    def solve(self) -> None:
        """Find sizes that go through.

        Raises:
            StuckError: there are none in reach.
        """
        left = 4 * len(self.dims) + 16
        while (conflict := self.run()) is not None:
            left -= 1
            if left < 0 or not (self._relate(conflict) or self._search(conflict)):
                raise StuckError(conflict)

    def _relate(self, conflict: Conflict) -> bool:
        """Learn from two sizes that must be equal: one dim, a fixed size, or a sum of other dims."""
        if conflict.sizes is None:
            return False
        for mine, other in (conflict.sizes, conflict.sizes[::-1]):
            same = (d for d in self.open_dims() if d.size == mine)
            dim = next((d for d in same if self._moves(conflict, d, mine) == 1), None)
            if dim is None:
                continue
            twin = next((d for d in self.open_dims() if d.size == other and d is not dim), None)
            if twin is not None:
                self._unite(dim, twin, conflict)
                return True
            if self._moves(conflict, dim, other) != 0:
                # Strides: both sizes come from this dim.
                return False
            others = [d for d in self.open_dims() if d is not dim]
            moves = [(d, self._moves(conflict, d, other)) for d in others]
            if any(step is None for _, step in moves):
                return False
            terms = [(d, step) for d, step in moves if step]
            self._settle(dim, terms, other, conflict)
            return True
        return False

    def open_dims(self) -> list[TrialDim]:
        """Those of which nothing but limits is to be found."""
        return [dim for dim in self.dims if dim.kind == "free"]

    def _moves(self, conflict: Conflict, dim: TrialDim, size: int) -> int | None:
        """By how much one of the two sizes in conflict grows with a dim; None where it is not a whole factor."""
        first, second, far = (
            self._change(conflict, dim, step, size) for step in (_SMALL_STEP, 2 * _SMALL_STEP, _LARGE_STEP)
        )
        if first is None or second is None:
            return None
        if first == second == 0:
            return 0 if not far else None
        return first // _SMALL_STEP if second == 2 * first and first % _SMALL_STEP == 0 else None

    def _change(self, conflict: Conflict, dim: TrialDim, step: int, size: int) -> int | None:
        """How one of the two sizes in conflict changes with a dim; None where another node fails, or none."""
        assert conflict.sizes is not None
        moved = self.run({id(dim): dim.size + step})
        if moved is None or moved.index != conflict.index or moved.sizes is None:
            return None
        return moved.sizes[conflict.sizes.index(size)] - size

    def _unite(self, dim: TrialDim, twin: TrialDim, conflict: Conflict) -> None:
        first, second = sorted((dim, twin), key=self.dims.index)
        first.axes.extend(second.axes)
        first.label = first.label or second.label
        first.reason = first.reason or f"equal: {place_of(conflict)}"
        self.dims.remove(second)
        for other in self.dims:
            other.terms = [(first if term is second else term, factor) for term, factor in other.terms]

    def _settle(self, dim: TrialDim, terms: list[tuple[TrialDim, int]], other: int, conflict: Conflict) -> None:
        """A dim has to have the size `other`, which is fixed or a sum of other dims."""
        if terms:
            dim.kind, dim.terms = "derived", terms
            dim.offset = other - sum(factor * term.value({}) for term, factor in terms)
            dim.reason = place_of(conflict)
        else:
            dim.kind, dim.size, dim.suggestion, dim.low, dim.high = "fixed", other, other, other, other
            dim.reason = f"{place_of(conflict)}: {conflict.why}"

    def _search(self, conflict: Conflict) -> bool:
        """Find sizes of one dim, or of several alike, that get past a node; at last with one sample only."""
        at_conflict = self._probe.inputs_at(conflict.index)
        dims = [dim for dim in self.open_dims() if self._matters(conflict, dim)] or self.open_dims()
        inner = [dim for dim in dims if dim.axes[0][1] > 0]
        # Alike first: of all the images with so many patches, the square ones.
        groups = ([inner] if len(inner) > 1 else []) + [[dim] for dim in dims] + ([dims] if len(dims) > 1 else [])
        one_sample = {id(dim): 1 for dim in self.open_dims() if dim.axes[0][1] == 0}
        attempts: list[tuple[Candidates, dict[int, int]]]
        attempts = [(candidates, {}) for candidates in (self._multiples, self._bisection, self._list)]
        attempts += [(self._list, one_sample)] if one_sample else []
        for candidates, others in attempts:
            for group in groups:
                for size in candidates(conflict, group):
                    sizes = {**others, **{id(dim): size for dim in group}}
                    moved = self.run(sizes)
                    is_past = moved is None or moved.index > conflict.index
                    reached = self._probe.inputs_at(conflict.index)
                    if is_past and not (conflict.op in ELEMENTWISE and _only_broadcasts(at_conflict, reached)):
                        self._take(sizes, conflict, is_alike=len(group) > 1)
                        return True
        return False

    def _take(self, sizes: Mapping[int, int], conflict: Conflict, is_alike: bool) -> None:
        for dim in (dim for dim in self.dims if id(dim) in sizes):
            dim.is_alike = is_alike
            dim.size = sizes[id(dim)]
            dim.reason = dim.reason or f"{place_of(conflict)}: {conflict.why}"

    def _matters(self, conflict: Conflict, dim: TrialDim) -> bool:
        moved = (self.run({id(dim): dim.size + step}) for step in (_SMALL_STEP, _LARGE_STEP))
        return any(m is None or m.index != conflict.index or m.why != conflict.why for m in moved)

    def _multiples(self, conflict: Conflict, group: Sequence[TrialDim]) -> Iterator[int]:
        """Multiples near the present size; where a size is too small for a window, some way above it: the least size
        that goes through leaves ones behind, which fit anything.
        """
        multiples = (2, 4, 8, 16, 32, 64, 128, 256, 512)
        if conflict.sizes is None:
            multiples = (64, 128, 256, 512, 2, 4, 8, 16, 32)
        yield from (math.ceil(group[0].size / multiple) * multiple for multiple in multiples)

    def _bisection(self, conflict: Conflict, group: Sequence[TrialDim]) -> Iterator[int]:
        """Sizes on the way to where the difference of the two sizes in conflict changes sign."""
        if conflict.sizes is None:
            return
        size = group[0].size
        first, last = self._gap(conflict, group, size), self._gap(conflict, group, size + _LARGE_STEP)
        if first is None or last is None or first == last:
            return
        grows = 1 if last > first else -1
        low, high = 0, _SEARCH_HIGH
        while high - low > 1:
            middle = (low + high) // 2
            yield middle
            gap = self._gap(conflict, group, middle)
            low, high = (middle, high) if gap is None or gap * grows < 0 else (low, middle)
        yield high

    def _list(self, _: Conflict, __: Sequence[TrialDim]) -> Iterator[int]:
        yield from _BRUTE

    def _gap(self, conflict: Conflict, group: Sequence[TrialDim], size: int) -> int | None:
        """By how much two sizes differ at the node in conflict; None where another node fails first."""
        moved = self.run({id(dim): size for dim in group})
        if moved is None or moved.index > conflict.index:
            return 0
        return None if moved.index < conflict.index or moved.sizes is None else moved.sizes[0] - moved.sizes[1]


def _only_broadcasts(before: Sequence[Shape], after: Sequence[Shape]) -> bool:
    """Whether two shapes that differed fit now because one has become 1 where both were larger: a fit of no use."""
    if len(before) != 2 or [len(shape) for shape in before] != [len(shape) for shape in after]:
        return False
    sizes = (tuple(zip(*(shape[::-1] for shape in shapes), strict=False)) for shapes in (before, after))
    return any(min(old) > 1 and old[0] != old[1] and min(new) == 1 < max(new) for old, new in zip(*sizes, strict=True))


def place_of(conflict: Conflict) -> str:
    """`node 'x' (Add)`."""
    return f"node {conflict.node!r} ({conflict.op})"
