"""`report.html`: the manifest as one page that a person likes to read.

The page is whole in itself: no request leaves it (its content policy forbids any), it reads without scripts, and the
one script that it carries only adds search fields. A section whose data is missing is absent. Equal manifests give
equal pages.
"""

from __future__ import annotations

from trtforge.manifest import Manifest
from trtforge.quantization.table import CalibrationTable
from trtforge.report import accuracy, calibration, engine, precision, sensitivity, summary
from trtforge.report.document import document, resource
from trtforge.report.markup import el

_SECTIONS = {
    "accuracy": "Accuracy",
    "precision": "Precision",
    "sensitivity": "Sensitivity",
    "calibration": "Calibration",
    "interface": "Inputs, outputs, profiles",
    "fusion": "Fusion",
    "plan": "Plan",
    "files": "Sizes and times",
    "lint": "Lint",
    "provenance": "Fingerprints",
}


def render_report(manifest: Manifest, table: CalibrationTable | None) -> str:
    """The page of an artifact.

    Args:
        manifest: of the artifact; everything on the page comes from it ...
        table: ... and from the calibration table, for what calibration saw beside amax; None when there is none.

    Returns:
        The text of `report.html`; its encoding is UTF-8.
    """
    sections = {
        "accuracy": accuracy.accuracy(manifest),
        "precision": precision.precision(manifest),
        "sensitivity": sensitivity.sensitivity(manifest),
        "calibration": calibration.calibration(manifest, table),
        "interface": engine.interface(manifest),
        "fusion": precision.fusion(manifest),
        "plan": engine.plan(manifest),
        "files": engine.files(manifest),
        "lint": engine.lint(manifest),
        "provenance": engine.provenance(manifest),
    }
    links = (el("a", _SECTIONS[anchor], href=f"#{anchor}") for anchor, content in sections.items() if content)
    body = el(
        "main",
        summary.header(manifest),
        summary.key_figures(manifest),
        summary.warnings(manifest),
        summary.remedies(manifest),
        el("nav", *links),
        *sections.values(),
    )
    word = summary.verdict(manifest.parity).word
    title = f"{manifest.model.name} {manifest.precision.requested}: {word}"
    return document(title, resource("style.css"), body, resource("filter.js"))
