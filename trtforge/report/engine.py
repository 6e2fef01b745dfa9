"""The engine and its surroundings: inputs and outputs, profiles, the compiled plan, files, times, environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trtforge.manifest import EngineInfo, IoInfo, Manifest, PlanInfo, ProfileInfo, RangeInfo
from trtforge.report import figures
from trtforge.report.markup import (
    NOTHING,
    Column,
    Html,
    block,
    code,
    el,
    fold,
    join,
    long_table,
    names,
    note,
    section,
    table,
)
from trtforge.report.precision import share_bar
from trtforge.report.summary import RTX

# Classes of the style sheet for parts of a bar that have no colour of their own.
NUM_COLOURS = 8
# Fields of a lint finding that are short, and that hold names.
_SHORT_FIELDS = frozenset(["rule", "severity"])
_CODE_FIELDS = frozenset(["rule", "node", "tensor"])


def interface(manifest: Manifest) -> Html:
    """The section on inputs, outputs and optimisation profiles."""
    columns = [Column("Name", "name"), Column("Direction"), Column("Type"), Column("Shape")]
    rows = [[code(io.name), io.mode, _dtype(io), code(figures.shape(io.shape))] for io in manifest.io]
    return section(
        "interface",
        "Inputs, outputs and profiles",
        block("Inputs and outputs", long_table(columns, rows)),
        block("Optimisation profiles", _profiles(manifest.profiles)),
    )


def _dtype(io: IoInfo) -> str:
    return io.dtype if io.source_dtype is None else f"{io.dtype} ({io.source_dtype} in the source)"


def plan(manifest: Manifest) -> Html:
    """The section on the compiled plan: what is in the engine, kernel by kernel."""
    info = manifest.plan
    if info.unreadable is not None:
        return section("plan", "Compiled plan", el("p", f"The plan could not be read: {info.unreadable}"))
    if not info.layers:
        return NOTHING
    proves = (
        "TensorRT-RTX chooses each GEMM's kernel when the engine is loaded, so the plan proves fusion, data types and "
        "the number of kernels, not the final kernels."
        if manifest.backend.name == RTX
        else "Read from the builder's own layer table."
    )
    is_shared = len(manifest.targets) > 1
    lowest = f" The engine holds the code of {manifest.targets[0]}, its lowest target." if is_shared else ""
    return section("plan", "Compiled plan", el("p", proves + lowest), _layers(info))


def lint(manifest: Manifest) -> Html:
    """The section on lint findings, whatever fields they have."""
    fields = list(dict.fromkeys(key for entry in manifest.lint for key in entry))
    columns = [Column(field.capitalize(), "text" if field in _SHORT_FIELDS else "name") for field in fields]
    rows = [
        [code(entry.get(field, "-")) if field in _CODE_FIELDS else entry.get(field, "-") for field in fields]
        for entry in manifest.lint
    ]
    return section("lint", "Lint", long_table(columns, rows))


def files(manifest: Manifest) -> Html:
    """The section on sizes and times."""
    columns = [Column("File"), Column("Size", "number"), Column("")]
    largest = max((info.bytes for info in manifest.files.values()), default=1) or 1
    rows = [
        [code(name), el("span", figures.size(info.bytes), title=f"{info.bytes:,} bytes"), _meter(info.bytes / largest)]
        for name, info in manifest.files.items()
    ]
    return section(
        "files", "Sizes and times", block("Files", table(columns, rows)), block("Build time", _timings(manifest))
    )


def provenance(manifest: Manifest) -> Html:
    """The section on fingerprints and environment."""
    prints = [("source model", manifest.model.sha256), ("all inputs", manifest.inputs_sha256)]
    if manifest.calibration is not None:
        prints.append(("calibration", manifest.calibration.sha256))
    if manifest.parity.data_sha256 is not None:
        prints.append(("evaluation data", manifest.parity.data_sha256))
    prints += [(name, info.sha256) for name, info in manifest.files.items()]
    hashes = table([Column("Of"), Column("SHA-256", "name")], [[code(name), code(value)] for name, value in prints])
    environment = [[code(key), code(value)] for key, value in _flat(manifest.environment)]
    return section(
        "provenance",
        "Fingerprints and environment",
        block("Fingerprints", hashes),
        block("Engine options", _engine_options(manifest.engine)),
        block("Environment", table([Column("What"), Column("Value", "name")], environment)),
    )


def _engine_options(info: EngineInfo) -> Html:
    """The options that are not at their default; nothing where all are."""
    changed = info.model_dump(mode="json", exclude_defaults=True)
    rows = [[code(name), code(value)] for name, value in _flat(changed)]
    return table([Column("Option"), Column("Value", "name")], rows) if rows else NOTHING


def _profiles(profiles: tuple[ProfileInfo, ...]) -> Html:
    columns = [Column("Profile", "name"), Column("Input", "name"), Column("min"), Column("opt"), Column("max")]
    rows = []
    for profile in profiles:
        rows += [_profile_row(profile.name, name, name_range, "") for name, name_range in profile.inputs.items()]
        rows += [_profile_row(profile.name, name, values, " (values)") for name, values in profile.values.items()]
    return long_table(columns, rows, keep=24)


def _profile_row(profile: str, name: str, bounds: RangeInfo, what: str) -> list[str]:
    sizes = [code(figures.shape(dims)) for dims in (bounds.min, bounds.opt, bounds.max)]
    return [code(profile), join([code(name), what]), *sizes]


def _layers(info: PlanInfo) -> Html:
    columns = [
        Column("#", "number"),
        Column("Kernel", "name"),
        Column("Kind"),
        Column("Reads"),
        Column("Writes"),
        Column("ONNX nodes", "name"),
    ]
    rows = [
        [
            str(index),
            code(layer.name),
            code(layer.type),
            figures.operands(layer.inputs),
            figures.operands(layer.outputs),
            names(layer.onnx_nodes, keep=4),
        ]
        for index, layer in enumerate(info.layers, 1)
    ]
    about = note(
        "One row per kernel, in order; -1 marks a dynamic dimension. ",
        "Small constants are only counted; names of operands show on hover.",
    )
    return fold(f"All {figures.count(len(rows), 'row')} of the plan", about, table(columns, rows, filterable=True))


def _timings(manifest: Manifest) -> Html:
    stages = {name: value for name, value in manifest.timings_s.items() if name != "total"}
    total = manifest.timings_s.get("total", sum(stages.values()))
    if not stages or total <= 0:
        return NOTHING
    parts = [
        (name, value / total, figures.seconds(value), f"c{index % NUM_COLOURS}")
        for index, (name, value) in enumerate(stages.items())
    ]
    return join([share_bar(parts), note(f"{figures.seconds(total)} in all.")])


def _meter(share: float) -> Html:
    return el("span", el("i", style=f"width:{100 * share:.1f}%"), class_="meter")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys and values as text; `packages.onnx` for a value inside `packages`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
