"""`trtforge profile`: the optimisation profiles of a model, from data, from a file, or from what its graph says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from trtforge.buckets import Bucketing, bucket_profiles, choose_buckets, fit_work, length_dim, with_dims
from trtforge.data import Dataset, open_dataset
from trtforge.errors import InputError
from trtforge.graph.cost import attention_flops, gemm_flops
from trtforge.graph.dims.report import dims_of_normalised
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.shapes import infer_shapes_at
from trtforge.graph.signature import input_specs
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.parity import MASK_INPUT
from trtforge.phases import phase_profiles, phase_template
from trtforge.profile import DimFact, DimReport, ProfileSet
from trtforge.profile_choice import CALIBRATION_BATCH, check_traced, find_profile, profiles_of_data, resolve_profiles
from trtforge.profile_sources import static_profiles
from trtforge.profile_text import dim_names, profile_template, profiles_to_yaml
from trtforge.shape_check import Source, check_profiles, note_missing_values
from trtforge.stages import load_source
from trtforge.traced_dims import TracedDims, read_traced_dims


@dataclasses.dataclass(frozen=True, slots=True)
class ProfileDescription:
    """Profiles as `trtforge profile` shows them.

    Attributes:
        yaml: the file's text; ranges to fill in are `?`.
        source: "file", "data", "graph", "static", or "open" where ranges are missing.
        open_dims: dims, and inputs whose values decide shapes, without a range.
        dims: what the graph says of its inputs' dims; None where nothing is open.
        buckets: what `--buckets` chose.
        notes: what was not checked, and why.
    """

    yaml: str
    source: str
    open_dims: tuple[str, ...]
    dims: DimReport | None = None
    buckets: Bucketing | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON values."""
        return dataclasses.asdict(self)


def describe_profile(
    path: Path,
    data: str | None = None,
    profile: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    *,
    buckets: int | None = None,
    prefill_decode: bool = False,
) -> ProfileDescription:
    """The profiles that a build of this model would use, checked; open dims give a template instead of an error.

    Args:
        path: the ONNX file.
        data: samples whose shapes give the ranges.
        profile: a YAML file to check and print.
        limits: bounds on untrusted input.
        buckets: how many length buckets to make.
        prefill_decode: make the two profiles of a decoder with a cache.

    Raises:
        InputError: a model, file or data that cannot be used, or shapes that the model cannot take.
    """
    if buckets is not None and prefill_decode:
        raise InputError("--buckets and --prefill-decode exclude each other", "each makes the profiles", "give one")
    if buckets is not None and data is None:
        raise InputError("--buckets needs data", "it counts the lengths of the samples", "give them with --data")
    loaded = load_source(path, limits)
    graph, specs = loaded.graph, input_specs(loaded.graph)
    traced = read_traced_dims(loaded.metadata, specs, limits)
    dataset = open_dataset(data, specs, limits) if data else None
    with OnnxNative() as native:
        graph, _ = normalise(graph, native=native)
        report = traced.narrow(dims_of_normalised(graph, native))
        return _Profiling(path, profile, dataset, limits, graph, report, native, traced).describe(
            buckets, prefill_decode
        )


class _Profiling:
    """The parts that one description is made from."""

    def __init__(
        self,
        path: Path,
        profile: str | None,
        data: Dataset | None,
        limits: Limits,
        graph: gs.Graph,
        report: DimReport,
        native: OnnxNative,
        traced: TracedDims,
    ) -> None:
        self._path = path
        self._traced = traced
        self._profile = profile
        self._data = data
        self._limits = limits
        self._graph = graph
        self._specs = input_specs(graph)
        self._report = report
        self._native = native
        self._notes = [*([report.note] if report.note else []), *traced.notes]

    def describe(self, buckets: int | None, prefill_decode: bool) -> ProfileDescription:
        """See `describe_profile`."""
        profiles = self._resolve()
        if profiles is None:
            return self._template(prefill_decode)
        bucketing = None
        if buckets is not None:
            profiles, bucketing = self._bucket(profiles, buckets)
        if prefill_decode:
            profiles = phase_profiles(profiles, self._specs, self._report)
        check_traced(profiles, self._traced.specs, self._traced.dims)
        note_missing_values(profiles, self._report, self._notes.append)
        source = Source(self._path, self._specs, self._data)
        check_profiles(source, self._graph, profiles, self._native, self._notes.append, lambda _: self._report)
        text = profiles_to_yaml(profiles, self._specs, self._report)
        return ProfileDescription(text, profiles.source, (), self._report, bucketing, tuple(self._notes))

    def _resolve(self) -> ProfileSet | None:
        """The profiles without buckets and phases; None where something is left to fill in."""
        specs, report = self._specs, self._report
        if self._profile is None and self._data is not None:
            # Data that is given wins over a file that only the conventions name.
            is_open = any(item.is_dynamic for item in specs) or bool(report.shape_inputs)
            return profiles_of_data(self._data, specs, report) if is_open else static_profiles(specs)
        if self._profile is not None or find_profile(self._path) is not None:
            return resolve_profiles(self._profile, self._path, specs, self._data, self._limits)
        has_choice = any(fact.kind == "free" for fact in report.dims) or bool(report.shape_inputs)
        has_unknown_rank = any(item.shape is None for item in specs)
        return None if has_choice or has_unknown_rank else static_profiles(specs, report)

    def _template(self, prefill_decode: bool) -> ProfileDescription:
        names = dict.fromkeys(
            dim for dims in dim_names(self._specs, report=self._report).values() for dim in dims if isinstance(dim, str)
        )
        filled_in = {fact.name for fact in self._report.dims if fact.suggestion is not None}
        text = profile_template(self._specs, self._report)
        if prefill_decode:
            text += phase_template(self._specs, self._report)
        missing = (*(name for name in names if name not in filled_in), *self._report.shape_inputs)
        return ProfileDescription(text, "open", missing, self._report, None, tuple(self._notes))

    def _bucket(self, profiles: ProfileSet, count: int) -> tuple[ProfileSet, Bucketing]:
        assert self._data is not None
        dim = self._masked_dim() or length_dim(profiles, self._report)
        name, axis = dim.axes[0]
        largest = profiles.first.inputs[name].max[axis]
        # A sample is padded at least to the next size that the graph takes.
        lengths = [max(dim.low, -(-length // dim.multiple) * dim.multiple) for length in _lengths(self._data, dim)]
        bucketing = choose_buckets(lengths, count, self._work(profiles, dim, lengths), largest)
        return bucket_profiles(profiles.first, dim, self._report, min(lengths), bucketing.caps), bucketing

    def _masked_dim(self) -> DimFact | None:
        """The dim that `attention_mask` pads, which tells the samples' own lengths."""
        fact = self._report.dim_at(MASK_INPUT, 1)
        return fact if fact is not None and fact.kind == "free" and len(fact.axes) > 1 else None

    def _work(self, profiles: ProfileSet, dim: DimFact, lengths: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
        """FLOPs of one sample by length: counted at the smallest, the middle and the largest."""
        low, high = min(lengths), max(lengths)
        sizes = sorted({low, max(low, (low + high) // 2 // dim.multiple * dim.multiple), high})
        flops = []
        for size in sizes:
            at = with_dims(profiles.first, "work", {dim.name: (size, size, size)}, self._report)
            shapes = infer_shapes_at(self._graph, {name: span.opt for name, span in at.inputs.items()}, self._native)
            counted = {**gemm_flops(self._graph, shapes), **attention_flops(self._graph, shapes)}
            flops.append(float(sum(counted.values())))
        return fit_work(sizes, flops)


def _lengths(data: Dataset, dim: DimFact) -> list[int]:
    """The length of every sample: up to the last position of `attention_mask` that is not 0, else of its arrays."""
    name, axis = dim.axes[0]
    lengths: list[int] = []
    for batch in data.batches(CALIBRATION_BATCH):
        mask = batch.feeds.get(MASK_INPUT)
        if mask is not None and mask.ndim == 2 and (MASK_INPUT, 1) in dim.axes:
            ends = mask.shape[1] - np.argmax(mask[:, ::-1] != 0, axis=1)
            lengths += [int(end) for end in np.where((mask != 0).any(axis=1), ends, 1)]
        else:
            lengths += [batch.feeds[name].shape[axis]] * len(batch)
    return lengths
