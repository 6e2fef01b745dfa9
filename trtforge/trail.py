"""What happened to a model on the way to its engine, step by step: what `build --explain` prints, on failure too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from trtforge import describe
from trtforge.errors import BuildError
from trtforge.graph.lint import Finding
from trtforge.manifest import Manifest
from trtforge.stages import Lowered, Prepared


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        stage: that took it.
        text: what was done or found, with node and reason.
    """

    stage: str
    text: str


def of_prepared(prepared: Prepared) -> Iterator[Step]:
    """What the passes did, which regions were rewritten and which nearly were."""
    report = prepared.normalised
    counts = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    changed = {name: count for name, count in counts.items() if name.startswith("num_") and count}
    changed.pop("num_qdq", None)
    words = ", ".join(f"{name[4:].replace('_', ' ')} {count}" for name, count in changed.items())
    yield Step("normalise", f"opset {report.source_opset} to {report.opset}; changed by pass: {words or 'nothing'}")
    for note in (*report.notes, *prepared.mended):
        yield Step("normalise", note)
    for region in describe.describe_fusion(prepared):
        yield Step("match", f"{region.region}: {region.pattern} is now {region.lowered_to}")
    for miss in describe.describe_near_misses(prepared):
        yield Step("match", f"{miss.node}: no {miss.pattern}, because {miss.reason}")


def of_lowered(prepared: Prepared, lowered: Lowered, findings: Sequence[Finding]) -> Iterator[Step]:
    """What was quantized and cast, what stayed wider and why, and what the linter says of the result."""
    known = {step.text for step in of_prepared(prepared)}
    if lowered.qdq is not None:
        yield Step("Q/DQ", f"{len(lowered.qdq.nodes)} nodes quantized")
        for kept in lowered.qdq.kept_float:
            yield Step("Q/DQ", f"{kept.node} stays float: {kept.reason}")
    if lowered.cast is not None:
        yield Step("cast", f"{len(lowered.cast.cast_nodes)} nodes run in {lowered.cast.dtype}")
        for kept in lowered.cast.kept_float32:
            yield Step("cast", f"{kept.node} stays float32: {kept.reason}")
    for note in describe.pass_notes(prepared, lowered):
        if note not in known:
            yield Step("lower", note)
    for finding in findings:
        yield Step("lint", f"{finding.what}: {finding.why}")


def of_refusal(error: BuildError) -> Iterator[Step]:
    """What the builder refused, as its diagnosis has it."""
    diagnosis = error.diagnosis
    yield Step("build", f"{error.what}: {error.why}")
    if diagnosis is not None:
        yield Step("build", f"kind of failure: {diagnosis.cause}")
        for shape in diagnosis.shapes:
            yield Step("build", f"it reads {shape}")
        if diagnosis.message not in error.why:
            yield Step("build", f"the builder's words: {diagnosis.message}")


def of_manifest(manifest: Manifest) -> Iterator[Step]:
    """The trail of an artifact that was there already."""
    for note in manifest.notes:
        yield Step("passes", note)
    for region in manifest.fusion:
        yield Step("match", f"{region.region}: {region.pattern} is now {region.lowered_to}")
    for miss in manifest.near_misses:
        yield Step("match", f"{miss.node}: no {miss.pattern}, because {miss.reason}")
    for kept in manifest.precision.kept_float:
        yield Step("precision", f"{kept.node} stays wider: {kept.reason}")
    for entry in manifest.remedies:
        yield Step("build", f"node {entry.node!r} ({entry.op}): {entry.reason}; {entry.remedy}")
