"""Build the engine of this model on the machine that serves it, once, and again after TensorRT-RTX was updated.

    python3 build_engine.py                for the GPU of this machine
    python3 build_engine.py --portable     for every GPU that TensorRT-RTX serves with one engine; needs no GPU

It reads `model.onnx` and `model.json` beside it and needs the package `tensorrt-rtx-cu13`. The engine is put in its
place once it is whole.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
GRAPH = "model.onnx"


def main() -> int:
    """Build and write the engine; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the engine of this model.")
    parser.add_argument("--portable", action="store_true", help="for every GPU that one engine serves")
    portable = parser.parse_args().portable
    try:
        trt = importlib.import_module("tensorrt_rtx")
    except ImportError as err:
        sys.stderr.write(f"error: TensorRT-RTX cannot be loaded: {err}\n  fix: pip install -r requirements.txt\n")
        return 2
    model = json.loads((FOLDER / "model.json").read_text(encoding="utf-8"))
    engine = build(trt, model, portable)
    if engine is None:
        sys.stderr.write("error: TensorRT-RTX did not build the engine; its own words are above\n")
        return 1
    target = FOLDER / model["file"]
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(engine)
    partial.replace(target)
    sys.stdout.write(f"{target}: built with TensorRT-RTX {trt.__version__}\n")
    return 0


def build(trt: Any, model: dict[str, Any], portable: bool) -> Any:
    """The engine as bytes, or None where the builder refuses."""
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    # Weights that lie in files of their own are found beside the graph.
    os.chdir(FOLDER)
    if not parser.parse_from_file(GRAPH):
        return None
    separate_dims(network, model["profiles"])
    decompose_attention(trt, network)
    config = builder.create_builder_config()
    if not portable:
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
    if not model["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    for entry in model["profiles"]:
        config.add_optimization_profile(make_profile(builder, network, entry))
    return builder.build_serialized_network(network, config)


def make_profile(builder: Any, network: Any, entry: dict[str, Any]) -> Any:
    """An optimisation profile: ranges of values for shape tensors, of shapes for all others."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        port = network.get_input(index)
        if port.is_shape_tensor:
            span = entry["values"][port.name]
            profile.set_shape_input(port.name, span["min"], span["opt"], span["max"])
        else:
            span = entry["inputs"][port.name]
            profile.set_shape(port.name, span["min"], span["opt"], span["max"])
    return profile


def separate_dims(network: Any, profiles: list[dict[str, Any]]) -> None:
    """Rename dims that share a name and have different ranges: the builder takes dims of one name for equal."""
    places: dict[str, list[tuple[Any, int]]] = {}
    for index in range(network.num_inputs):
        port = network.get_input(index)
        for axis, dim in enumerate(port.shape):
            name = port.get_dimension_name(axis)
            if dim == -1 and name:
                places.setdefault(name, []).append((port, axis))
    for shared in places.values():
        ranges = {
            tuple((entry["inputs"][port.name][kind][axis]) for entry in profiles for kind in ("min", "opt", "max"))
            for port, axis in shared
        }
        if len(ranges) > 1:
            for port, axis in shared:
                port.set_dimension_name(axis, f"{port.name}_{axis}")


def decompose_attention(trt: Any, network: Any) -> None:
    """Let an Attention that has no fused kernel be built from its parts instead of failing."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


if __name__ == "__main__":
    sys.exit(main())
