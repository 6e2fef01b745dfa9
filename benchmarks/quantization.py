"""INT8 by trtforge, ModelOpt and ONNX Runtime: accuracy, seconds and peak memory on five models, in one run.

    python benchmarks/quantization.py build/benchmark --setup build/peers
    python benchmarks/quantization.py build/benchmark --models digits --tools trtforge --variant "--recipe minilm"

Each tool gets the same fp32 file and calibration data, runs alone in a process of its own with its defaults for INT8,
and is timed from its start to its end. Every quantized file is then scored alike: outputs against the fp32 file on the
same other data, both in ONNX Runtime with graph optimisation off, so that Q/DQ is computed as written; and built by
trtforge with the rest in fp16, to see in the compiled plan how much runs in INT8. Scoring and that build are not timed.
A tool that fails keeps its row, with the reason. The machine must be quiet, or seconds mean little.

Needs trtforge with the extras rtx, export, examples and dev.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cases import CASES, ROOT, Case, PreparationError, load_metric, prepare_case
from machine import describe_machine
from process import run_measured
from quantizers import (
    NEEDS_SETUP,
    TRTFORGE,
    Files,
    Quantizer,
    find_python,
    list_quantizers,
    read_versions,
    set_up_peers,
)
from scoring import run_model, score_model
from tables import write_tables

MEMORY_SHARE = 0.6

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tool may take before it is stopped."""

    timeout_s: float
    memory_bytes: int


def read_plan(path: Path, profile: Path, folder: Path, limits: Limits) -> Row:
    """Build a quantized file with the rest in fp16; return what its compiled plan says, or why it did not build."""
    out = folder / f"{path.stem}-engine"
    options = ["--fp16", "--no-verify", "--force", "--profile", str(profile), "--output", str(out)]
    log = folder / f"{path.stem}-build.log"
    built = run_measured([*TRTFORGE, "build", str(path), *options], log, limits.timeout_s, limits.memory_bytes)
    if built.error is not None:
        return {"build_error": built.error}
    manifest = json.loads((out / "manifest.json").read_text())
    return {
        "int8_gemm_share": manifest["precision"]["gemm_flops_fraction"].get("int8", 0.0),
        "kernels": manifest["plan"]["kernels"],
        "fused_attention": manifest["plan"]["fused_attention"],
    }


class Comparison:
    """One case: its reference outputs, and a row for each quantizer."""

    def __init__(self, case: Case, folder: Path, limits: Limits) -> None:
        """Make what is missing and run the fp32 model; raises PreparationError."""
        prepare_case(case, folder)
        self.case = case
        self.folder = folder
        self.limits = limits
        self.model = case.locate(case.model, folder)
        self.calib = case.locate(case.calib, folder)
        self.profile = ROOT / case.profile
        with np.load(case.locate(case.eval, folder)) as arrays:
            self.data = dict(arrays)
        self.metric = load_metric(case)
        self.reference = run_model(self.model, self.data)

    def describe(self) -> Row:
        """Return the figures of the fp32 model and the number of samples."""
        with np.load(self.calib) as arrays:
            calibration_samples = len(arrays[arrays.files[0]])
        return {
            "title": self.case.title,
            "calibration_samples": calibration_samples,
            "evaluation_samples": len(next(iter(self.data.values()))),
            "fp32": self.metric(self.reference, self.reference, self.data),
        }

    def measure(self, name: str, quantizer: Quantizer, python: str | None) -> Row:
        """Run one quantizer and score what it wrote."""
        if python is None:
            return {"tool": quantizer.title, "error": NEEDS_SETUP}
        stem = name.replace(" ", "_").replace("/", "_")
        folder = self.folder / "quantized" / self.model.stem
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"{stem}{'.json' if quantizer.is_table else '.onnx'}"
        out.unlink(missing_ok=True)
        command = quantizer.make_command(Files(self.model, self.calib, self.profile, out), python)
        log = folder / f"{stem}.log"
        measured = run_measured(command, log, self.limits.timeout_s, self.limits.memory_bytes)
        row: Row = {
            "tool": quantizer.title,
            "seconds": round(measured.seconds, 1),
            "peak_mb": round(measured.peak_bytes / 1e6),
        }
        if measured.error is not None:
            return row | {"error": measured.error}
        if quantizer.is_table:
            return row
        try:
            row |= score_model(out, self.reference, self.data, self.metric)
        except Exception as err:  # whatever a peer's file makes ONNX Runtime or the metric raise is that row's result
            row |= {"error": f"its file does not run: {type(err).__name__}: {err}".splitlines()[0][:200]}
        return row | read_plan(out, self.profile, folder, self.limits)


def describe_conditions(limits: Limits, peers: Mapping[str, str]) -> Row:
    """Return the versions and the machine; `peers` holds the interpreter of each peer that runs."""
    return describe_machine(("trtforge", "onnxruntime", "numpy")) | {
        "peers": {name: read_versions(name, python) for name, python in peers.items()},
        "limits": {"seconds": limits.timeout_s, "memory_mb": round(limits.memory_bytes / 1e6)},
    }


def show(name: str, row: Row) -> None:
    """Print one row as it comes."""
    figures = {key: value for key, value in row.items() if key not in ("tool", "seconds", "peak_mb")}
    shown = ", ".join(
        f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )
    print(
        f"{name:<13} {row['tool']:<38} {row.get('seconds', 0):7.1f} s {row.get('peak_mb', 0):6} MB  {shown}", flush=True
    )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models, data and quantized files")
    parser.add_argument("--setup", type=Path, metavar="DIR", help="the peers' environments, made where they are absent")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--tools", nargs="+", metavar="PREFIX", default=[""], help="such as trtforge, modelopt-max")
    parser.add_argument("--variant", action="append", default=[], metavar="OPTIONS", help="of trtforge quantize: a row")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="for .json and .md")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for one tool on one model")
    return parser.parse_args()


def main() -> None:
    """Run every chosen tool on every chosen model, write quantization.json and quantization.md."""
    options = parse_options()
    available = list_quantizers(options.variant)
    chosen = {name: tool for name, tool in available.items() if name.startswith(tuple(options.tools))}
    if not chosen:
        raise SystemExit(f"no tool begins with {' or '.join(options.tools)}; there are {', '.join(available)}")
    environments = sorted({tool.environment for tool in chosen.values() if tool.environment is not None})
    if options.setup is not None:
        set_up_peers(environments, options.setup)
    peers = {name: python for name in environments if (python := find_python(name, options.setup)) is not None}
    limits = Limits(options.timeout, int(MEMORY_SHARE * psutil.virtual_memory().available))
    result: Row = {"conditions": describe_conditions(limits, peers), "models": {}}
    for name in options.models:
        try:
            comparison = Comparison(CASES[name], options.folder, limits)
        except PreparationError as err:
            result["models"][name] = {"title": CASES[name].title, "error": str(err), "tools": []}
            print(f"{name:<13} {err}", file=sys.stderr)
            continue
        entry = comparison.describe() | {"tools": []}
        result["models"][name] = entry
        for short, quantizer in chosen.items():
            row = comparison.measure(short, quantizer, find_python(quantizer.environment, options.setup))
            entry["tools"].append(row)
            show(name, row)
        # Written after each model: a long run that is interrupted keeps what it has.
        write_tables(result, options.output)
    write_tables(result, options.output)


if __name__ == "__main__":
    main()
