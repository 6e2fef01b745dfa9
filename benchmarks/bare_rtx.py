"""The least code that builds an engine with TensorRT-RTX's own API: what `trtforge build --no-verify` is compared with.

    python benchmarks/bare_rtx.py model.onnx out.engine input_ids=1x1,8x128,32x512 attention_mask=1x1,8x128,32x512

Each argument gives the least, usual and greatest shape of one input; `-` is the shape of a scalar. A leading `@` gives
values of a shape-tensor input in place of shapes: `@sizes=1x1,8x128,32x512`.
"""

import sys
from pathlib import Path

import tensorrt_rtx as trt


def parse_dims(text: str) -> tuple[int, ...]:
    """`8x128` as (8, 128); `-` as no dimension."""
    return () if text == "-" else tuple(int(dim) for dim in text.split("x"))


def main() -> None:
    """Parse, add one profile, build, write."""
    model, engine, *ranges = sys.argv[1:]
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(model):
        sys.exit(str(parser.get_error(0)))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for entry in ranges:
        name, _, bounds = entry.rpartition("=")
        shapes = [parse_dims(bound) for bound in bounds.split(",")]
        if name.startswith("@"):
            profile.set_shape_input(name[1:], *shapes)
        else:
            profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        sys.exit("the builder returned no engine")
    Path(engine).write_bytes(plan)


main()
