"""How the results of the stages are written into a stage cache and read back (cache/store.py).

Reports are dataclasses and pydantic models: they become JSON and are validated when they come back. Graphs are ONNX
files, which pass the checks of every model that is read; arrays are frames (frames.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import onnx_graphsurgeon as gs
import pydantic

from trtforge.backends.base import BuildResult
from trtforge.backends.plan import EnginePlan
from trtforge.cache.folder import DamagedError
from trtforge.cache.store import Entry
from trtforge.frames import Arrays, BadFrameError, GoneError, pack_frame, read_frame
from trtforge.graph.lint import Finding
from trtforge.graph.load import load_model
from trtforge.graph.normalise import NormaliseReport
from trtforge.graph.save import save_model
from trtforge.limits import Limits
from trtforge.manifest import ENGINE_NAME, LOG_NAME, MODEL_NAME, Manifest
from trtforge.spec import FLOAT_DTYPES, Precision
from trtforge.stages import Lowered

if TYPE_CHECKING:
    from trtforge.fusion.lower_block import BlockReport
    from trtforge.quantization.cast import CastReport
    from trtforge.quantization.qdq import QdqReport
    from trtforge.quantization.rounding import RoundedWeights
    from trtforge.quantization.table import CalibrationTable
    from trtforge.quantization.weight_only_graph import StoredWeights

T = TypeVar("T")
Files = dict[str, Path]

_ARRAYS = "arrays.bin"
_GRAPH = "graph.onnx"


class JsonCodec(Generic[T]):
    """Of results that are JSON.

    Args:
        kind: a dataclass, a pydantic model, or a composition of them.
    """

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind

    def save(self, value: T, scratch: Path) -> tuple[Any, Files]:  # noqa: ARG002
        """See `cache.Codec`."""
        return pydantic.TypeAdapter(self._kind).dump_python(value, mode="json"), {}

    def load(self, entry: Entry) -> T:
        """See `cache.Codec`."""
        return pydantic.TypeAdapter(self._kind).validate_python(entry.value)


@dataclasses.dataclass(frozen=True, slots=True)
class NormalisedCodec:
    """Of the normalised graph. One with external data is not stored: reading it back takes longer than making it.

    Attributes:
        limits: bounds on the graph that is read.
    """

    limits: Limits

    def save(self, value: tuple[gs.Graph, NormaliseReport], scratch: Path) -> tuple[Any, Files] | None:
        """See `cache.Codec`."""
        graph, report = value
        written = save_model(graph, scratch / _GRAPH)
        content = pydantic.TypeAdapter(NormaliseReport).dump_python(report, mode="json")
        return (content, {_GRAPH: written[0]}) if len(written) == 1 else None

    def load(self, entry: Entry) -> tuple[gs.Graph, NormaliseReport]:
        """See `cache.Codec`."""
        loaded = load_model(entry.path(_GRAPH), self.limits)
        if loaded.sha256 != entry.file(_GRAPH).sha256:
            raise DamagedError("its graph changed")
        return loaded.graph, pydantic.TypeAdapter(NormaliseReport).validate_python(entry.value)


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredCodec:
    """Of the graph that is built and its lint findings; none with external data.

    Attributes:
        model: its place, where it is when it is stored and where it is put.
        limits: bounds on the graph that is read.
    """

    model: Path
    limits: Limits

    def save(self, value: tuple[Lowered, tuple[Finding, ...]], scratch: Path) -> tuple[Any, Files] | None:  # noqa: ARG002
        """See `cache.Codec`."""
        if self.model.with_name(f"{self.model.name}.data").exists():
            return None
        lowered, findings = value
        content = _lowered_reports().dump_python((lowered.qdq, lowered.cast, lowered.blocks, findings), mode="json")
        return content, {MODEL_NAME: self.model}

    def load(self, entry: Entry) -> tuple[Lowered, tuple[Finding, ...]]:
        """See `cache.Codec`."""
        entry.fetch(MODEL_NAME, self.model)
        qdq, cast, blocks, findings = _lowered_reports().validate_python(entry.value)
        return Lowered(load_model(self.model, self.limits).graph, qdq, cast, blocks), findings


class CalibrationCodec:
    """Of the ranges of the activations, and the weights that were rounded for them."""

    def save(self, value: tuple[CalibrationTable, RoundedWeights], scratch: Path) -> tuple[Any, Files]:
        """See `cache.Codec`."""
        table, rounded = value
        arrays: Arrays = {f"bias {index}": bias for index, bias in enumerate(rounded.biases.values())}
        for index, weight in enumerate(rounded.weights.values()):
            arrays |= {f"codes {index}": weight.codes, f"scales {index}": weight.scales}
        content = {
            "table": table.model_dump(mode="json"),
            "weights": list(rounded.weights),
            "biases": list(rounded.biases),
            "learned": list(rounded.learned),
        }
        return content, {_ARRAYS: _write_arrays(arrays, scratch)}

    def load(self, entry: Entry) -> tuple[CalibrationTable, RoundedWeights]:
        """See `cache.Codec`."""
        from trtforge.quantization.formats import QuantizedWeight
        from trtforge.quantization.rounding import RoundedWeights
        from trtforge.quantization.table import CalibrationTable

        content, arrays = entry.value, _read_arrays(entry)
        weights = {
            node: QuantizedWeight(arrays[f"codes {index}"], arrays[f"scales {index}"])
            for index, node in enumerate(content["weights"])
        }
        biases = {node: arrays[f"bias {index}"] for index, node in enumerate(content["biases"])}
        rounded = RoundedWeights(weights, biases, tuple(content["learned"]))
        return CalibrationTable.model_validate(content["table"]), rounded


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeightsCodec:
    """Of the weights of a weight-only build.

    Attributes:
        precision: of the build.
    """

    precision: Precision

    def save(self, value: StoredWeights, scratch: Path) -> tuple[Any, Files]:
        """See `cache.Codec`."""
        arrays: Arrays = {f"factors {index}": factors for index, factors in enumerate(value.factors.values())}
        for index, weight in enumerate(value.weights.values()):
            arrays |= {f"codes {index}": weight.codes, f"scales {index}": weight.scales}
        content = {
            "placement": dataclasses.asdict(value.placement),
            "weights": [list(key) for key in value.weights],
            "factors": list(value.factors),
            "notes": list(value.notes),
        }
        return content, {_ARRAYS: _write_arrays(arrays, scratch)}

    def load(self, entry: Entry) -> StoredWeights:
        """See `cache.Codec`."""
        from trtforge.quantization.formats import FORMATS, QuantizedWeight
        from trtforge.quantization.sites import Placement
        from trtforge.quantization.weight_only_graph import StoredWeights, weight_layout

        content, arrays = entry.value, _read_arrays(entry)
        weights = {
            (name, axis): QuantizedWeight(arrays[f"codes {index}"], arrays[f"scales {index}"])
            for index, (name, axis) in enumerate(content["weights"])
        }
        return StoredWeights(
            placement=pydantic.TypeAdapter(Placement).validate_python(content["placement"]),
            layout=weight_layout(FORMATS[self.precision.quantization or ""], FLOAT_DTYPES[self.precision.base]),
            weights=weights,
            factors={name: arrays[f"factors {index}"] for index, name in enumerate(content["factors"])},
            notes=tuple(content["notes"]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCodec:
    """Of the engine, with the builder's log.

    Attributes:
        folder: where they are when they are stored, and where they are put.
    """

    folder: Path

    def save(self, value: BuildResult, scratch: Path) -> tuple[Any, Files]:  # noqa: ARG002
        """See `cache.Codec`."""
        content = _build_results().dump_python(value, mode="json", exclude={"engine"})
        return content, {name: self.folder / name for name in (ENGINE_NAME, LOG_NAME)}

    def load(self, entry: Entry) -> BuildResult:
        """See `cache.Codec`."""
        result = _build_results().validate_python(entry.value | {"engine": self.folder / ENGINE_NAME})
        for name in (ENGINE_NAME, LOG_NAME):
            entry.fetch(name, self.folder / name)
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class ArtifactCodec:
    """Of all files of an artifact but the report; times and places in the manifest are those of its first build.

    Attributes:
        folder: where they are when they are stored, and where they are put.
    """

    folder: Path

    def save(self, value: Manifest, scratch: Path) -> tuple[Any, Files]:  # noqa: ARG002
        """See `cache.Codec`."""
        return value.model_dump(mode="json"), {name: self.folder / name for name in (*value.files, LOG_NAME)}

    def load(self, entry: Entry) -> Manifest:
        """See `cache.Codec`."""
        manifest = Manifest.model_validate(entry.value)
        for name in (*manifest.files, LOG_NAME):
            if Path(name).name != name:
                raise DamagedError(f"it has a file {name!r}")
            entry.fetch(name, self.folder / name)
        return manifest


def _lowered_reports() -> pydantic.TypeAdapter[
    tuple[QdqReport | None, CastReport | None, BlockReport | None, tuple[Finding, ...]]
]:
    from trtforge.fusion.lower_block import BlockReport
    from trtforge.quantization.cast import CastReport
    from trtforge.quantization.qdq import QdqReport

    return pydantic.TypeAdapter(tuple[QdqReport | None, CastReport | None, BlockReport | None, tuple[Finding, ...]])


def _build_results() -> pydantic.TypeAdapter[BuildResult]:
    adapter = pydantic.TypeAdapter(BuildResult)
    # Its module knows this type for type checkers only.
    adapter.rebuild(_types_namespace={"EnginePlan": EnginePlan})
    return adapter


def _write_arrays(arrays: Arrays, scratch: Path) -> Path:
    path = scratch / _ARRAYS
    with path.open("wb") as file:
        for buffer in pack_frame("arrays", {}, arrays):
            file.write(buffer)
    return path


def _read_arrays(entry: Entry) -> Arrays:
    try:
        with entry.open(_ARRAYS) as file:
            return read_frame(file, entry.file(_ARRAYS).bytes)[2]
    except (BadFrameError, GoneError, OSError) as err:
        raise DamagedError(f"its arrays are no frame: {err}") from err
