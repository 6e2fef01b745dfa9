"""What happened to a model on the way to its engine, step by step: what `build --explain` prints, on failure too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from trtforge import describe
from trtforge.errors import BuildError
from trtforge.graph.lint import Finding
from trtforge.manifest import Manifest
from trtforge.progress import Event
from trtforge.stages import Lowered, Prepared


def _step(stage: str, text: str) -> Event:
    return Event(stage, text, "detail")


def of_prepared(prepared: Prepared) -> Iterator[Event]:
    """What the passes did, which regions were rewritten and which nearly were."""
    report = prepared.normalised
    counts = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    changed = {name: count for name, count in counts.items() if name.startswith("num_") and count}
    changed.pop("num_qdq", None)
    words = ", ".join(f"{name[4:].replace('_', ' ')} {count}" for name, count in changed.items())
    yield _step("normalise", f"opset {report.source_opset} to {report.opset}; changed by pass: {words or 'nothing'}")
    for note in (*report.notes, *prepared.mended):
        yield _step("normalise", note)
    for region in describe.describe_fusion(prepared):
        yield _step("match", region.describe())
    for miss in describe.describe_near_misses(prepared):
        yield _step("match", f"{miss.node}: no {miss.pattern}, because {miss.reason}")


def of_lowered(prepared: Prepared, lowered: Lowered, findings: Sequence[Finding]) -> Iterator[Event]:
    """What was quantized and cast, what stayed wider and why, and what the linter says of the result."""
    known = {step.detail for step in of_prepared(prepared)}
    if lowered.qdq is not None:
        yield _step("Q/DQ", f"{len(lowered.qdq.nodes)} nodes quantized")
        for kept in lowered.qdq.kept_float:
            yield _step("Q/DQ", f"{kept.node} stays float: {kept.reason}")
    if lowered.cast is not None:
        yield _step("cast", f"{len(lowered.cast.cast_nodes)} nodes run in {lowered.cast.dtype}")
        for kept in lowered.cast.kept_float32:
            yield _step("cast", f"{kept.node} stays float32: {kept.reason}")
    for entry in describe.describe_fusion(prepared, lowered):
        if entry.describe() not in known:
            yield _step("lower", entry.describe())
    for note in describe.pass_notes(prepared, lowered):
        if note not in known:
            yield _step("lower", note)
    for finding in findings:
        yield _step("lint", f"{finding.what}: {finding.why}")


def of_refusal(error: BuildError) -> Iterator[Event]:
    """What the builder refused, as its diagnosis has it."""
    diagnosis = error.diagnosis
    yield _step("build", f"{error.what}: {error.why}")
    if diagnosis is not None:
        yield _step("build", f"kind of failure: {diagnosis.cause}")
        for shape in diagnosis.shapes:
            yield _step("build", f"it reads {shape}")
        if diagnosis.message not in error.why:
            yield _step("build", f"the builder's words: {diagnosis.message}")


def of_manifest(manifest: Manifest) -> Iterator[Event]:
    """The trail of an artifact that was there already."""
    for note in manifest.notes:
        yield _step("passes", note)
    for region in manifest.fusion:
        yield _step("match", region.describe())
    for miss in manifest.near_misses:
        yield _step("match", f"{miss.node}: no {miss.pattern}, because {miss.reason}")
    for kept in manifest.precision.kept_float:
        yield _step("precision", f"{kept.node} stays wider: {kept.reason}")
    for entry in manifest.remedies:
        yield _step("build", entry.describe())
