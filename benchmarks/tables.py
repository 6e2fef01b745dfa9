"""The results of a comparison as quantization.json and as Markdown tables in quantization.md."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Not metrics: these have columns of their own, or go into the row's last column.
FIXED = ("tool", "seconds", "peak_mb", "error", "build_error", "int8_gemm_share", "kernels", "fused_attention")


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [list(header), ["--"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in cells)


def format_row(row: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return the cells of one quantizer; a figure that it has not is empty."""

    def show(key: str, spelling: str) -> str:
        return spelling.format(row[key]) if key in row else ""

    notes = [row["error"]] if "error" in row else []
    if "build_error" in row:
        notes.append(f"TensorRT-RTX does not build it: {row['build_error']}")
    return [
        row["tool"],
        *(show(metric, "{:.4f}") for metric in metrics),
        show("int8_gemm_share", "{:.1%}"),
        show("kernels", "{}"),
        show("fused_attention", "{}"),
        show("seconds", "{:.1f}"),
        show("peak_mb", "{}"),
        "; ".join(notes),
    ]


def format_versions(versions: Mapping[str, str]) -> str:
    """Return names with their versions in one line."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def format_model(entry: Mapping[str, Any]) -> str:
    """Return the section of one model."""
    if "error" in entry:
        return f"## {entry['title']}\n\nNot run: {entry['error']}\n"
    rows = entry["tools"]
    metrics = list(dict.fromkeys(key for row in rows for key in row if key not in FIXED))
    header = ["tool", *metrics, "INT8 GEMM FLOPs", "kernels", "fused attention", "seconds", "peak MB", "notes"]
    fp32 = ", ".join(f"{name} {value:.4f}" for name, value in entry["fp32"].items())
    samples = (
        f"{entry['calibration_samples']} calibration samples, {entry['evaluation_samples']} others for the figures"
    )
    table = format_table(header, [format_row(row, metrics) for row in rows])
    return f"## {entry['title']}\n\n{samples}; fp32: {fp32}.\n\n{table}\n"


def format_report(result: Mapping[str, Any]) -> str:
    """Return the whole Markdown document."""
    facts = result["conditions"]
    versions = format_versions(facts["versions"])
    peers = "; ".join(f"{name}'s with {format_versions(found)}" for name, found in facts["peers"].items())
    machine = f"{facts['cpu']}, {facts['cores']} cores, load average {facts['load_average_at_start']} at the start"
    conditions = (
        f"{facts['date']}; {machine}; Python {facts['python']}, {versions}; environments: {peers or 'none'}. "
        "Written by `benchmarks/quantization.py`, which says how each figure is taken."
    )
    return "\n".join(["# INT8 quantizers compared\n", conditions + "\n", *map(format_model, result["models"].values())])


def write_tables(result: Mapping[str, Any], folder: Path) -> None:
    """Write quantization.json and quantization.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quantization.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "quantization.md").write_text(format_report(result), encoding="utf-8")
