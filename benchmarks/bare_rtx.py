"""The least code that builds an fp32 engine with TensorRT-RTX's own API: what `build --no-verify` is compared with.

python benchmarks/bare_rtx.py model.onnx out.engine input_ids,attention_mask,token_type_ids 1x1 8x128 32x512
"""

import sys
from pathlib import Path

import tensorrt_rtx as trt


def main() -> None:
    """Parse, add one profile that all inputs share, build, write."""
    model, engine, names, *shapes = sys.argv[1:]
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(model):
        sys.exit(str(parser.get_error(0)))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name in names.split(","):
        profile.set_shape(name, *([int(dim) for dim in shape.split("x")] for shape in shapes))
    config.add_optimization_profile(profile)
    Path(engine).write_bytes(builder.build_serialized_network(network, config))


main()
