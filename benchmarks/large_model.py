"""Memory that trtforge takes for a model larger than it wants to hold: seconds and peak of each command.

    python benchmarks/large_model.py build/large [--gigabytes 5]

The model is a chain of MatMuls with external data in a sparse file, which takes no disk space until the cast writes
its fp16 form. Peak memory is PSS of the process tree (benchmarks/process.py); a mapped page counts while it is held.
"""

import argparse
import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper
from process import run_measured
from quantizers import TRTFORGE

# Rows and columns of a weight, 128 MiB in float32; layers alternate between this shape and its transpose.
ROWS, COLUMNS = 4096, 8192
TIMEOUT_S = 1800.0


def make_model(path: Path, num_layers: int, rows: int = ROWS, columns: int = COLUMNS) -> int:
    """Write a chain of MatMul and Relu whose weights are a sparse file beside it; gives the bytes of the weights."""
    data = path.with_suffix(".data")
    nodes, weights, offset, current = [], [], 0, "x"
    for index in range(num_layers):
        dims = (rows, columns) if index % 2 == 0 else (columns, rows)
        num_bytes = 4 * rows * columns
        weight = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=dims)
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", offset), ("length", num_bytes)):
            weight.external_data.add(key=key, value=str(value))
        weights.append(weight)
        offset += num_bytes
        nodes.append(helper.make_node("MatMul", [current, f"w{index}"], [f"h{index}"], name=f"matmul{index}"))
        nodes.append(helper.make_node("Relu", [f"h{index}"], [f"r{index}"], name=f"relu{index}"))
        current = f"r{index}"
    last = rows if num_layers % 2 == 0 else columns
    graph = helper.make_graph(
        nodes,
        "large",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", rows])],
        [helper.make_tensor_value_info(current, TensorProto.FLOAT, ["batch", last])],
        initializer=weights,
    )
    with data.open("wb") as file:
        file.truncate(offset)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()
    )
    return offset


def cast_model(source: Path, output: Path) -> None:
    """Write the fp16 form of a model: the stages of `build --fp16` up to the engine, in this process."""
    from trtforge import stages
    from trtforge.graph.native import OnnxNative
    from trtforge.graph.save import save_model
    from trtforge.graph.signature import input_specs
    from trtforge.limits import DEFAULT_LIMITS
    from trtforge.profile_sources import ProfileFile, profiles_from_file
    from trtforge.spec import Precision

    loaded = stages.load_source(source, DEFAULT_LIMITS)
    content = ProfileFile.model_validate({"dims": {"batch": {"min": 1, "opt": 4, "max": 8}}})
    profiles = profiles_from_file(content, input_specs(loaded.graph), "the benchmark")
    precision = Precision(None, "fp16")
    with OnnxNative() as native:
        graph, report = stages.normalise_source(loaded, precision, native)
        prepared = stages.prepare(graph, report, profiles, precision, native)
    save_model(stages.lower(prepared.graph, precision, None).graph, output)


def measure_commands(folder: Path, gigabytes: float) -> None:
    """Run every command on the model and print what it took."""
    model = folder / "large.onnx"
    num_layers = max(2, round(gigabytes * 1e9 / (4 * ROWS * COLUMNS)))
    num_bytes = make_model(model, num_layers)
    print(f"{onnx.__name__} {onnx.__version__}, {num_layers} layers, {num_bytes / 1e9:.2f} GB of external data")
    print(f"{'command':>10} {'seconds':>9} {'peak MB':>9} {'of its size':>12}")
    commands = {
        "inspect": [*TRTFORGE, "inspect", str(model)],
        "profile": [*TRTFORGE, "profile", str(model)],
        "lint": [*TRTFORGE, "lint", str(model)],
        "fp16 cast": [sys.executable, __file__, "--cast", str(model), str(folder / "fp16.onnx")],
    }
    for name, command in commands.items():
        run = run_measured(command, folder / "log.txt", TIMEOUT_S, 3 * num_bytes)
        peak = f"{run.peak_bytes / 1e6:>9.0f} {run.peak_bytes / num_bytes:>12.2f}"
        print(f"{name:>10} {run.seconds:>9.1f} {peak}", end="")
        print(f"  failed: {run.error}" if run.error else "")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/large"))
    parser.add_argument("--gigabytes", type=float, default=5.0, help="size of the weights")
    parser.add_argument("--cast", nargs=2, type=Path, metavar=("MODEL", "OUT"), help="only cast one model to fp16")
    options = parser.parse_args()
    if options.cast:
        cast_model(*options.cast)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    measure_commands(options.folder, options.gigabytes)


if __name__ == "__main__":
    main()
