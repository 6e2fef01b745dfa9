"""`manifest.json`: everything that was decided and measured while an artifact was made (schema version 1).

Equal inputs give an equal manifest outside `timings_s` and `environment` (and the engine's own hash: builders promise
no bit-identical engines).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from trtforge.errors import InputError
from trtforge.export_info import ExportInfo
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.parity import OutputParity, meets_budget
from trtforge.sensitivity import SensitivityInfo
from trtforge.textfile import FileModel, kind_of, parse_json, read_text, validate

# Names of an artifact's files.
MANIFEST_NAME = "manifest.json"
ENGINE_NAME = "model.engine"
MODEL_NAME = "model.onnx"
TABLE_NAME = "calibration.json"
REPORT_NAME = "report.html"
LOG_NAME = "build.log"


class ModelInfo(FileModel):
    """The source model; `sha256` covers its external data."""

    name: str
    sha256: str


class BackendInfo(FileModel):
    """The builder."""

    name: str
    version: str


class KeptFloatEntry(FileModel):
    """A node that INT8 was asked for and that stayed float, or one that stayed fp32 in an fp16 build, and why."""

    node: str
    reason: str


class RemedyEntry(FileModel):
    """What was done about a node that the builder refused as it was, or that it has no fused kernel for."""

    node: str
    op: str
    reason: str
    remedy: str

    def describe(self) -> str:
        """`node 'up' (ConvTranspose): <reason>; <remedy>`."""
        return f"node {self.node!r} ({self.op}): {self.reason}; {self.remedy}"


class WeightStorage(FileModel):
    """Weights stored in one low format: how many, their bytes with scales, and what they took in their float type."""

    count: Annotated[int, pydantic.Field(ge=0)]
    bytes: Annotated[int, pydantic.Field(ge=0)]
    float_bytes: Annotated[int, pydantic.Field(ge=0)]


class PrecisionInfo(FileModel):
    """What was asked for and what the compiled plan does.

    Attributes:
        requested: e.g. "int8" (the rest in fp16), "int8+bf16", "fp32".
        nodes: number of weighted nodes by the type that both operands have in the plan.
        node_types: that type of every weighted node and attention product, in graph order.
        gemm_flops_fraction: share of the weighted nodes' FLOPs at the first profile's opt, by that type; empty when
            the plan could not be read.
        attention_flops_fraction: the same for batched MatMuls of two activations.
        kept_float: nodes that stayed float, by ONNX node name.
        weights: what weights in INT8, FP8 and INT4 take in the built graph, by format.
    """

    requested: str
    nodes: dict[str, int]
    node_types: dict[str, str] = pydantic.Field(default_factory=dict)
    gemm_flops_fraction: dict[str, float]
    attention_flops_fraction: dict[str, float]
    kept_float: tuple[KeptFloatEntry, ...]
    weights: dict[str, WeightStorage] = pydantic.Field(default_factory=dict)


class FusionEntry(FileModel):
    """A region and what it became.

    Attributes:
        region: name of one of its nodes.
        pattern: what it is.
        lowered_to: in which form it was built.
        reason: why it stays as it was, where it does.
    """

    region: str
    pattern: str
    lowered_to: str
    reason: str | None = None

    def describe(self) -> str:
        """In a sentence."""
        if self.reason is None:
            return f"{self.region}: {self.pattern} is now {self.lowered_to}"
        return f"{self.region}: {self.pattern} stays as it was, because {self.reason}"


class NearMissEntry(FileModel):
    """A region that nearly matched a pattern: where it stopped, and why."""

    pattern: str
    node: str
    reason: str


class PlanTensor(FileModel):
    """An operand of a kernel; -1 marks a dynamic dim."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class PlanLayerEntry(FileModel):
    """One kernel of the engine."""

    name: str
    type: str
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    onnx_nodes: tuple[str, ...]


class PlanInfo(FileModel):
    """The engine's layer table as the builder logged it.

    Attributes:
        kernels: number of kernel launches.
        gemm: number of GEMM and convolution kernels by operand type.
        fused_attention: number of fused attention kernels.
        layers: one entry per row of the table.
        unreadable: why the table could not be read; None when it was.
    """

    kernels: int
    gemm: dict[str, int]
    fused_attention: int
    layers: tuple[PlanLayerEntry, ...]
    unreadable: str | None = None


class EngineInfo(FileModel):
    """How the builder was told to make the engine; see `engine_options.EngineOptions`.

    Attributes:
        plugins: SHA-256 of each plugin library by its file name; whoever runs the engine has to load them as well.
        plugin_layers: layers of the network that a plugin computes.
        workspace: in bytes.
    """

    plugins: dict[str, str] = pydantic.Field(default_factory=dict)
    plugin_layers: Annotated[int, pydantic.Field(ge=0)] = 0
    refit: bool = False
    strip_weights: bool = False
    version_compatible: bool = False
    hardware_compatible: str = "none"
    optimization_level: int | None = None
    workspace: int | None = None


class RangeInfo(FileModel):
    """min, opt and max of one input's shape or values."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> RangeInfo:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError("min, opt and max differ in length")
        if any(not low <= opt <= high for low, opt, high in zip(self.min, self.opt, self.max, strict=True)):
            raise ValueError("needs min <= opt <= max")
        return self


class ProfileInfo(FileModel):
    """One optimisation profile."""

    name: str
    inputs: dict[str, RangeInfo]
    values: dict[str, RangeInfo] = pydantic.Field(default_factory=dict)


class IoInfo(FileModel):
    """An input or output of the engine.

    Attributes:
        dtype: what the engine takes or gives.
        source_dtype: the type that the source, and the graph in `model.onnx`, has instead; None where it is the same.
    """

    name: str
    mode: Literal["input", "output"]
    dtype: str
    shape: tuple[int | str | None, ...] | None
    source_dtype: str | None = None


class CalibrationInfo(FileModel):
    """How activation ranges were found; `sha256` is the data's; `amax` by tensor in graph order."""

    method: str
    samples: int
    sha256: str
    recipe_sha256: str = ""
    amax: dict[str, float]


class BatchParity(FileModel):
    """Figures at one batch size."""

    batch: int
    samples: int
    outputs: dict[str, OutputParity]


class NodeError(FileModel):
    """A node's own error against the fp32 reference, for finding what costs accuracy."""

    node: str
    sqnr_db: float | None


class ParityInfo(FileModel):
    """Accuracy of the artifact.

    Attributes:
        reference: what the outputs were compared with.
        candidate: what was run: "the built graph in ONNX Runtime", with ", fp16 emulated" or ", bf16 emulated" added
            where every result was rounded to that type by a Cast; or "the engine on a GPU".
        verified: False when nothing was compared.
        passed: every output met the budget at every batch size; None when not verified.
        budget: the mean cosine to reach.
        samples: number of samples compared.
        data_sha256: fingerprint of the evaluation data.
        outputs: figures at the opt batch.
        batches: the same at every batch size that was run.
        before_qdq: figures of the same graph without Q/DQ, so that each step's loss shows.
        metrics: top1 and the user's metric: name -> {"fp32", "before_qdq", "candidate"} -> value.
        worst_nodes: filled when the budget was missed, worst first.
        note: why nothing was compared, what the comparison leaves out, or what explains a missed budget.
        figure: the metric's figure that the budget is on; None is the mean cosine of every output.
    """

    reference: str
    candidate: str
    verified: bool
    passed: bool | None
    budget: float
    samples: int = 0
    data_sha256: str | None = None
    outputs: dict[str, OutputParity] = pydantic.Field(default_factory=dict)
    batches: tuple[BatchParity, ...] = ()
    before_qdq: dict[str, OutputParity] = pydantic.Field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = pydantic.Field(default_factory=dict)
    worst_nodes: tuple[NodeError, ...] = ()
    note: str | None = None
    figure: str | None = None

    def meets(self, budget: float) -> bool:
        """Whether every output is finite and what the budget is on reaches it; False when nothing was compared."""
        if self.figure is None:
            return bool(self.batches) and all(meets_budget(run.outputs, budget) for run in self.batches)
        is_finite = not any(output.nan for run in self.batches for output in run.outputs.values())
        return is_finite and self.metrics.get(self.figure, {}).get("candidate", -math.inf) >= budget


class FileInfo(FileModel):
    """One file of the artifact."""

    sha256: str
    bytes: Annotated[int, pydantic.Field(ge=0)]


class Manifest(FileModel):
    """The content of `manifest.json`.

    Attributes:
        inputs_sha256: fingerprint of everything that changes the artifact.
        engine: how the builder was told to make the engine.
        sensitivity: how nodes that stay float were found; None where INT8 alone met the budget.
        export: how the ONNX model was made, and how far it is from torch; None where the source is ONNX.
        remedies: what was done so that the builder took the graph.
        warnings: what the user was told during the build.
        notes: what the graph passes did not do, or did to values.
    """

    schema_version: Literal[1] = 1
    trtforge_version: str
    inputs_sha256: str
    model: ModelInfo
    backend: BackendInfo
    targets: tuple[str, ...]
    engine: EngineInfo = pydantic.Field(default_factory=EngineInfo)
    precision: PrecisionInfo
    fusion: tuple[FusionEntry, ...]
    near_misses: tuple[NearMissEntry, ...]
    plan: PlanInfo
    profiles: tuple[ProfileInfo, ...]
    io: tuple[IoInfo, ...]
    calibration: CalibrationInfo | None
    parity: ParityInfo
    sensitivity: SensitivityInfo | None = None
    export: ExportInfo | None = None
    lint: tuple[dict[str, str], ...] = ()
    remedies: tuple[RemedyEntry, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, FileInfo]
    timings_s: dict[str, float]
    environment: dict[str, Any]

    def to_json(self) -> str:
        """The text of the file: stable key order, one trailing newline."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def load_manifest(directory: Path, limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """The manifest of an artifact.

    Raises:
        InputError: not an artifact, or a manifest that does not hold.
    """
    path = directory / MANIFEST_NAME
    if kind_of(path, "manifest") != "file":
        raise InputError(
            f"{directory} is not a trtforge artifact",
            f"it has no {MANIFEST_NAME}",
            "give the folder that `trtforge build` wrote",
        )
    value = parse_json(read_text(path, "manifest", limits), str(path))
    if isinstance(value, dict) and value.get("schema_version") != 1:
        raise InputError(
            f"{path} has schema version {value.get('schema_version')!r}",
            "this trtforge reads version 1",
            "use the trtforge that made the artifact, or build it again",
        )
    manifest = validate(Manifest, value, str(path))
    missing = [f"files.{name}" for name in (ENGINE_NAME, MODEL_NAME) if name not in manifest.files]
    missing += [] if manifest.profiles else ["profiles"]
    inputs = [port.name for port in manifest.io if port.mode == "input"]
    missing += [
        f"profiles.{p.name}.inputs.{name}" for p in manifest.profiles for name in inputs if name not in p.inputs
    ]
    if missing:
        raise InputError(
            f"{path} is not whole",
            f"it lacks {', '.join(missing[:8])}",
            "it was changed by hand: build the artifact again",
        )
    return manifest
