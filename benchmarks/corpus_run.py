"""One model of the corpus: profile from its data, fp16 and INT8 by trtforge, and a bare parse-and-build beside them.

Every step is a user's command in a process of its own with a time and a memory limit.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from corpus_models import Model
from process import Measurement, run_measured
from quantizers import TRTFORGE

BARE = Path(__file__).parent / "bare_rtx.py"
PRECISIONS = ("fp16", "int8")
BUILDS = (*PRECISIONS, "bare")
MAX_MESSAGE_CHARACTERS = 600

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may take before it is stopped."""

    timeout_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Files:
    """Where one model's files lie.

    Attributes:
        model: the ONNX file.
        data: holds `calib/` and `eval/`, and takes `profile.yaml`.
        work: takes artifacts and logs.
    """

    model: Path
    data: Path
    work: Path

    @property
    def profile(self) -> Path:
        """The profile that `trtforge profile` derives from the data."""
        return self.data / "profile.yaml"


def describe_model(path: Path, model: Model) -> Row:
    """Return what the table says of a model: origin, kind, samples, opset, nodes and size."""
    proto = onnx.load(path, load_external_data=False)
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return {
        "package": model.package,
        "origin": model.origin,
        "kind": model.kind,
        "samples": "natural" if model.natural else "synthetic",
        "opset": opset,
        "nodes": len(proto.graph.node),
        "mb": round(path.stat().st_size / 1e6, 1),
    }


def read_failure(log: Path, measured: Measurement) -> Row:
    """Return why a command failed: trtforge's error document, else the builder's first error, else the last words."""
    lines = log.read_text("utf-8", "replace").splitlines()
    for line in lines:
        if line.startswith('{"error":'):
            error = json.loads(line)["error"]
            return {key: value for key, value in error.items() if value}
    native = next((line.partition("[E] ")[2] for line in lines if "[E] " in line), None)
    return {"what": (native or measured.error or "no output")[:MAX_MESSAGE_CHARACTERS]}


def start_row(measured: Measurement, log: Path, is_built: bool) -> Row:
    """Return whether an engine came out, the seconds of the whole process, and why none did."""
    row: Row = {"built": is_built, "seconds": round(measured.seconds, 1), "peak_mb": round(measured.peak_bytes / 1e6)}
    return row if is_built else row | {"failure": read_failure(log, measured)}


def derive_profile(files: Files, limits: Limits) -> Row:
    """Write the profile that the data's shapes give; nobody writes YAML by hand."""
    log = files.work / "profile.log"
    files.profile.unlink(missing_ok=True)
    arguments = ["profile", str(files.model), "--data", str(files.data / "calib"), "-o", str(files.profile), "--json"]
    measured = run_measured([*TRTFORGE, *arguments], log, limits.timeout_s, limits.memory_bytes)
    return start_row(measured, log, measured.error is None and files.profile.exists())


def build_engine(precision: str, files: Files, limits: Limits) -> Row:
    """Build with trtforge, and read the accuracy out of the manifest."""
    out, log = files.work / precision, files.work / f"{precision}.log"
    data = ["--calib", str(files.data / "calib"), "--eval", str(files.data / "eval"), "--profile", str(files.profile)]
    arguments = ["build", str(files.model), f"--{precision}", *data, "--budget", "0", "--force", "--json"]
    measured = run_measured([*TRTFORGE, *arguments, "-o", str(out)], log, limits.timeout_s, limits.memory_bytes)
    # Exit 1 keeps the artifact: it was built, and something in it failed a check.
    is_built = measured.error is None or (measured.error.startswith("exit 1") and (out / "manifest.json").exists())
    row = start_row(measured, log, is_built)
    if is_built:
        row |= read_manifest(json.loads((out / "manifest.json").read_text("utf-8")))
    # Some fifty engines and graphs would be gigabytes; the logs stay.
    shutil.rmtree(out, ignore_errors=True)
    return row


def read_manifest(manifest: Mapping[str, Any]) -> Row:
    """Return the accuracy of the built graph (mean and least cosine, each of the worst output) and its INT8 share."""
    parity = manifest["parity"]
    outputs = parity["outputs"].values()
    row: Row = {
        "verified": parity["verified"],
        "int8_gemm_share": round(manifest["precision"]["gemm_flops_fraction"].get("int8", 0.0), 4),
        "remedies": manifest.get("remedies", []),
    }
    if outputs:
        row["cosine"] = min(output["cosine"] for output in outputs)
        row["cosine_min"] = min(output["cosine_min"] for output in outputs)
        row["nan"] = any(output["nan"] for output in outputs)
    return row


def read_ranges(profile: Path) -> list[str]:
    """Return the arguments of `bare_rtx.py` for a profile file of one profile, as data gives it: shapes and values."""
    document = yaml.safe_load(profile.read_text("utf-8")) or {}
    dims = document.get("dims") or {}

    def bound(entry: Any, which: str) -> int:
        value = dims.get(entry, entry) if isinstance(entry, str) else entry
        return int(value[which]) if isinstance(value, dict) else int(value)

    def spell(entries: Sequence[Any], which: str) -> str:
        return "x".join(str(bound(entry, which)) for entry in entries) or "-"

    ranges = [
        f"{name}={','.join(spell(entries, which) for which in ('min', 'opt', 'max'))}"
        for name, entries in (document.get("inputs") or {}).items()
    ]
    ranges += [
        f"@{name}={','.join(spell(entry[which], which) for which in ('min', 'opt', 'max'))}"
        for name, entry in (document.get("values") or {}).items()
    ]
    return ranges


def measure_ranges(data: Path) -> list[str]:
    """Return the arguments of `bare_rtx.py` for the shapes of the calibration data, where there is no profile."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path in sorted((data / "calib").glob("*.npz")):
        with np.load(path) as feed:
            for name in feed.files:
                shapes.setdefault(name, []).append(feed[name].shape)
    ranges = []
    for name, found in shapes.items():
        axes = list(zip(*found, strict=True))
        usual = [statistics.mode(axis) for axis in axes]
        bounds = ([min(axis) for axis in axes], usual, [max(axis) for axis in axes])
        ranges.append(f"{name}={','.join('x'.join(map(str, bound)) or '-' for bound in bounds)}")
    return ranges


def build_bare(files: Files, limits: Limits) -> Row:
    """Parse and build the same file with the same ranges, and nothing else."""
    engine, log = files.work / "bare.engine", files.work / "bare.log"
    engine.unlink(missing_ok=True)
    ranges = read_ranges(files.profile) if files.profile.exists() else measure_ranges(files.data)
    command = [sys.executable, str(BARE), str(files.model), str(engine), *ranges]
    measured = run_measured(command, log, limits.timeout_s, limits.memory_bytes)
    row = start_row(measured, log, measured.error is None and engine.exists())
    engine.unlink(missing_ok=True)
    return row


def measure_model(model: Model, files: Files, limits: Limits, steps: Sequence[str]) -> Row:
    """Return one model's row.

    Args:
        model: its entry.
        files: its paths; its file and samples are there.
        limits: for each command.
        steps: of `BUILDS`, those to run.
    """
    files.work.mkdir(parents=True, exist_ok=True)
    row = describe_model(files.model, model)
    row["profile"] = derive_profile(files, limits)
    for step in steps:
        if step == "bare":
            row[step] = build_bare(files, limits)
        elif row["profile"]["built"]:
            row[step] = build_engine(step, files, limits)
        else:
            row[step] = {"built": False, "failure": row["profile"]["failure"]}
    return row


def show_row(name: str, row: Row) -> str:
    """Return a model's row in one line, and a line for each failure."""
    cells, failures = [], []
    for step in BUILDS:
        entry = row.get(step)
        if entry is None:
            continue
        cosine = f" cosine {entry['cosine']:.5f}" if "cosine" in entry else ""
        cells.append(f"{step} {'ok' if entry['built'] else 'NO'} {entry.get('seconds', 0):.1f} s{cosine}")
        if not entry["built"] and step != "bare":
            failures.append(f"    {step}: {entry['failure'].get('what')}; {entry['failure'].get('why', '')}")
    return "\n".join([f"{name:<22} " + ", ".join(cells), *failures])
