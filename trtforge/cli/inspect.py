"""`trtforge inspect`: what a model or an artifact holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli import options
from trtforge.cli.render import format_bytes, plain, print_json, print_table

if TYPE_CHECKING:
    from trtforge.inspection import ModelDescription
    from trtforge.manifest import Manifest

NAME = "inspect"
# Characters of a shape or node list in the plan's table.
_MAX_CELL = 60


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="An .onnx file, or a folder that `build` wrote.")],
    limit: options.LimitOption = None,
    as_json: options.AsJson = False,
) -> int:
    """Show inputs, operators and findings of a model, or accuracy, precision and compiled plan of an artifact."""
    from trtforge.artifact import damaged_files
    from trtforge.inspection import inspect_model
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.manifest import load_manifest
    from trtforge.textfile import kind_of

    limits = DEFAULT_LIMITS.override(limit or ())
    if kind_of(path, "model or artifact") == "folder":
        manifest = load_manifest(path, limits)
        for name in damaged_files(path, manifest):
            sys.stderr.write(
                f"warning: {plain(name)} is missing or not as the manifest records; what follows is of the "
                "artifact as it was built\n"
            )
        if as_json:
            print_json(manifest.model_dump(mode="json"))
        else:
            _print_artifact(path, manifest)
        return 0
    model = inspect_model(path, limits)
    if as_json:
        print_json(model.to_dict())
    else:
        _print_model(model)
    return 0


def _print_model(model: ModelDescription) -> None:
    sys.stdout.write(f"{plain(model.name)}: opset {model.opset}, {model.num_nodes} nodes, ")
    sys.stdout.write(f"{format_bytes(model.weight_bytes)} of weights, sha256 {model.sha256[:12]}\n")
    print_table([("input", spec.describe()) for spec in model.inputs])
    print_table([("output", spec.describe()) for spec in model.outputs])
    print_table([(op, str(count)) for op, count in model.ops.items()])
    for finding in model.findings:
        sys.stdout.write(f"  {finding.severity} {finding.rule}: {plain(finding.node)}: {plain(finding.what)}\n")


def _print_artifact(path: Path, m: Manifest) -> None:
    from trtforge.cli.build import print_summary
    from trtforge.pipeline import BuildResult

    print_summary(BuildResult(path, m, reused=False, passed=m.parity.passed is not False))
    if m.precision.kept_float:
        sys.stdout.write("kept float:\n")
        print_table([(entry.node, entry.reason) for entry in m.precision.kept_float])
    sys.stdout.write("plan:\n")
    rows = [("#", "type", "operands", "kernel", "ONNX nodes")]
    for index, layer in enumerate(m.plan.layers):
        operands = " x ".join(tensor.dtype for tensor in layer.inputs[:2])
        nodes = ", ".join(layer.onnx_nodes)
        rows.append((str(index), layer.type, operands, _cut(layer.name), _cut(nodes)))
    print_table(rows)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 3] + "..."
