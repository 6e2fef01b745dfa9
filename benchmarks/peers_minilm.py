"""INT8 accuracy of MiniLM by several quantizers, in one run on one machine.

    python examples/minilm/export.py build/minilm.onnx && python examples/minilm/make_data.py build
    python benchmarks/peers_minilm.py build --modelopt-python /path/to/venv/bin/python

Each tool gets the same fp32 file and the same 128 calibration texts, runs in a process of its own with its defaults for
INT8, and is scored on the same 256 other texts: masked-mean pooled embeddings against the fp32 file, both in ONNX
Runtime with graph optimisation off, so that Q/DQ is computed as written. ModelOpt lives in an environment of its own
(`pip install "nvidia-modelopt[onnx]"`) and is left out where none is given. Time is the tool's whole process, without
scoring; memory is its largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "minilm"))
BATCH = 8

# Each is run as `python -c`, with the model, the data and the file to write as arguments.
TRTFORGE = """
import sys, trtforge
model, calib, out = sys.argv[1:]
trtforge.quantize(model, out, calib=calib, profile="minilm", force=True)
"""
ORT_QDQ = """
import sys, numpy as np
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
model, calib, out = sys.argv[1:]
data = dict(np.load(calib))
class Reader(CalibrationDataReader):
    def __init__(self):
        self.rows = iter(range(len(data["input_ids"])))
    def get_next(self):
        row = next(self.rows, None)
        return None if row is None else {name: array[row : row + 1] for name, array in data.items()}
quantize_static(model, out, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, op_types_to_quantize=["MatMul"],
    activation_type=QuantType.QInt8, weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod.MinMax,
    extra_options={"ActivationSymmetric": True, "WeightSymmetric": True})
"""
MODELOPT = """
import sys, numpy as np
from modelopt.onnx.quantization import quantize
model, calib, out = sys.argv[1:]
quantize(model, quantize_mode="int8", calibration_data=dict(np.load(calib)), calibration_method="max", output_path=out)
"""


def run_tool(python: str, code: str, arguments: list[str]) -> tuple[bool, float, float]:
    """Whether a tool succeeded, its seconds, and the peak memory in MB of its largest process."""
    started = time.perf_counter()
    log = Path(arguments[-1]).with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen([python, "-c", code, *arguments], stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode == 0, time.perf_counter() - started, usage.ru_maxrss / 1e3


def run_model(path: Path, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs over all samples."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    count = len(data["input_ids"])
    parts = [
        session.run(names, {name: array[start : start + BATCH] for name, array in data.items()})
        for start in range(0, count, BATCH)
    ]
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(names)}


def score(
    path: Path,
    reference: dict[str, np.ndarray],
    data: dict[str, np.ndarray],
    metric: Callable[..., dict[str, float]],
) -> dict[str, float]:
    """Pooled cosine and nearest-neighbour agreement of a quantized model."""
    return metric(run_model(path, data), reference, data)


def main() -> None:
    """Run every tool, print a table, write `benchmarks/results/peers_minilm.json`."""
    from metric import pooled_cosine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds minilm.onnx, calib.npz and eval.npz")
    parser.add_argument("--modelopt-python", help="interpreter that has nvidia-modelopt")
    options = parser.parse_args()
    model, calib = options.folder / "minilm.onnx", options.folder / "calib.npz"
    data = dict(np.load(options.folder / "eval.npz"))
    reference = run_model(model, data)
    tools = {
        "trtforge": (sys.executable, TRTFORGE),
        f"ONNX Runtime {onnxruntime.__version__} QDQ, MatMul, MinMax": (sys.executable, ORT_QDQ),
    }
    if options.modelopt_python:
        tools["ModelOpt int8, max"] = (options.modelopt_python, MODELOPT)
    rows = []
    for index, (name, (python, code)) in enumerate(tools.items()):
        out = options.folder / f"peer-{index}.onnx"
        succeeded, seconds, peak_mb = run_tool(python, code, [str(model), str(calib), str(out)])
        figures = score(out, reference, data, pooled_cosine) if succeeded else {}
        rows.append({"tool": name, "seconds": round(seconds, 1), "peak_mb": round(peak_mb), **figures})
        shown = ", ".join(f"{key} {value:.4f}" for key, value in figures.items()) or "failed, see its log"
        print(f"{name:<50} {seconds:6.1f} s {peak_mb:6.0f} MB  {shown}", flush=True)
    result = {"cpus": os.cpu_count(), "platform": platform.platform(), "samples": len(data["input_ids"]), "tools": rows}
    path = ROOT / "benchmarks" / "results" / "peers_minilm.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
