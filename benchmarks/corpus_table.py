"""The results of the corpus: totals, corpus.json, and corpus.md with a row for each model and a list of failures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corpus_run import BUILDS, PRECISIONS
from tables import format_table, format_versions

from trtforge.spec import precision_from_name

# What `trtforge build` asks of a precision where no --budget is given.
BUDGETS = {name: precision_from_name(name).default_budget for name in PRECISIONS}

Row = dict[str, Any]
Rows = Mapping[str, Row]


def count_totals(rows: Rows) -> dict[str, dict[str, int]]:
    """Return, for each build, how many models it was run on and how many it built; synthetic models are left out.

    `accurate` counts the engines whose graph reaches the usual budgets of trtforge: mean cosine of the worst output.
    """
    real = [row for row in rows.values() if row["origin"] != "synthetic"]
    totals = {}
    for build in BUILDS:
        found = [row[build] for row in real if build in row]
        totals[build] = {"models": len(found), "built": sum(entry["built"] for entry in found)}
        if build in BUDGETS:
            totals[build]["accurate"] = sum(entry.get("cosine", -1.0) >= BUDGETS[build] for entry in found)
    return totals


def format_totals(rows: Rows) -> str:
    """`fp16: builds 40 of 41, 38 of them accurate (cosine >= 0.999)` and so on, a line for each build."""
    lines = []
    for build, total in count_totals(rows).items():
        line = f"{build}: builds {total['built']} of {total['models']}"
        if "accurate" in total:
            line += f", {total['accurate']} of them with a mean cosine of {BUDGETS[build]} or more"
        lines.append(line)
    packages = {row["package"] for row in rows.values() if row["origin"] != "synthetic"}
    real = sum(row["origin"] != "synthetic" for row in rows.values())
    return "\n".join([f"{real} models from {len(packages)} packages", *lines])


def format_build(entry: Row | None) -> list[str]:
    """Return the cells of one build: built or not, seconds, cosine (mean / least)."""
    if entry is None:
        return ["", "", ""]
    figures = f"{entry['cosine']:.5f} / {entry['cosine_min']:.5f}" if "cosine" in entry else ""
    return ["yes" if entry["built"] else "**no**", f"{entry.get('seconds', 0):.1f}", figures]


def format_row(name: str, row: Row) -> list[str]:
    """Return the cells of one model."""
    cells = [name, row["package"], row["origin"], row["samples"], row["kind"], str(row["opset"])]
    for precision in PRECISIONS:
        cells += format_build(row.get(precision))
    share = row.get("int8", {}).get("int8_gemm_share")
    return [*cells, "" if share is None else f"{share:.0%}", *format_build(row.get("bare"))[:2]]


def format_failure(failure: Row) -> str:
    """Return a failure in one line: where, what, why, what to do."""
    found = failure.get("diagnosis") or {}
    where = " ".join(str(found[key]) for key in ("op", "node") if found.get(key))
    parts = [where, failure.get("what"), failure.get("why"), failure.get("fix") and f"fix: {failure['fix']}"]
    return "; ".join(" ".join(str(part).split()) for part in parts if part)


def list_failures(rows: Rows) -> list[str]:
    """Return a line of Markdown for each build that failed."""
    return [
        f"- `{name}` {build}: {format_failure(row[build]['failure'])}"
        for name, row in rows.items()
        for build in BUILDS
        if "failure" in row.get(build, {})
    ]


def list_remedies(rows: Rows) -> list[str]:
    """Return a line of Markdown for each remedy that a build needed."""
    return [
        f"- `{name}` {precision}: {remedy['remedy']} (`{remedy['node']}`, {remedy['reason']})"
        for name, row in rows.items()
        for precision in PRECISIONS
        for remedy in row.get(precision, {}).get("remedies", [])
    ]


def format_report(result: Mapping[str, Any]) -> str:
    """Return the whole Markdown document."""
    facts, rows = result["conditions"], result["models"]
    machine = f"{facts['cpu']}, {facts['cores']} cores, load average {facts['load_average_at_start']} at the start"
    conditions = (
        f"{facts['date']}; {machine}; Python {facts['python']}, {format_versions(facts['versions'])}. Written by "
        "`benchmarks/corpus.py`, which says how each figure is taken. Seconds are of the whole command; cosines are of "
        "the built graph in ONNX Runtime against the file, mean / least over 16 samples, of the worst output."
    )
    header = ["model", "package", "origin", "samples", "kind", "opset"]
    for precision in PRECISIONS:
        header += [precision, "seconds", "cosine"]
    header += ["INT8 GEMM FLOPs", "bare", "seconds"]
    table = format_table(header, [format_row(name, row) for name, row in rows.items()])
    parts = [
        "# Real models from packages\n",
        conditions + "\n",
        "\n".join(f"- {line}" for line in format_totals(rows).splitlines()) + "\n",
        table + "\n",
    ]
    for title, lines in (("Failures", list_failures(rows)), ("Remedies applied", list_remedies(rows))):
        parts += [f"## {title}\n", "\n".join(lines or ["None."]) + "\n"]
    return "\n".join(parts)


def write_results(result: Mapping[str, Any], folder: Path) -> None:
    """Write corpus.json and corpus.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "corpus.md").write_text(format_report(result), encoding="utf-8")
