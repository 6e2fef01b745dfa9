"""Train a small vision transformer on scikit-learn's digits and export it with its data: `python train.py`.

1,797 grey 8x8 images, values 0..16 divided by 16, split by class with a fixed seed:

    360 test         eval.npz; scored once, after training; never trained on, calibrated with or chosen by
    180 validation   what the settings below were chosen by
    1,257 fit        trained on, shifted and turned a little; 256 of them, as they are, are calibration/model.npz

Writes model.onnx (opset 20, image [B, 1, 8, 8] -> logits [B, 10]), calibration/model.npz and eval.npz to `--output`,
which is this file's folder unless given, and checks the file in ONNX Runtime against torch. Takes minutes on two cores.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

NUM_TEST, NUM_VALIDATION, NUM_CALIBRATION = 360, 180, 256
NUM_BLOCKS, WIDTH, NUM_HEADS, FFN_WIDTH = 4, 192, 3, 768
PATCH, NUM_TOKENS, NUM_CLASSES = 2, 16, 10
BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY, LABEL_SMOOTHING = 64, 1e-3, 0.05, 0.1
OPSET = 20
# fp32 rounding over four blocks is about 1e-6 of logits near 5.
MAX_EXPORT_ERROR = 1e-4


class Block(nn.Module):
    """Pre-norm encoder block: x + attention(norm(x)), then x + FFN(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, FFN_WIDTH)
        self.fc2 = nn.Linear(FFN_WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[B, S, H]` to `[B, S, H]`."""
        # chunk becomes Split, the spelling that trtforge rewrites.
        q, k, v = (self.split_heads(part) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))

    @staticmethod
    def split_heads(x: Tensor) -> Tensor:
        """Turn x `[B, S, H]` into `[B, N, S, D]`."""
        return x.unflatten(2, (NUM_HEADS, WIDTH // NUM_HEADS)).transpose(1, 2)


class DigitsVit(nn.Module):
    """Vision transformer over 16 patches of 2x2 pixels, mean pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        # As large as the patch embedding: at the usual 0.02 the first ten epochs learn nothing.
        self.pos_embed = nn.Parameter(torch.randn(1, NUM_TOKENS, WIDTH) * 0.5)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map image `[B, 1, 8, 8]`, values 0..1, to logits `[B, 10]`."""
        tokens = self.patch_embed(image).flatten(2).transpose(1, 2) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(dim=1))
        return logits


@dataclass(frozen=True, slots=True)
class Part:
    """images `[N, 1, 8, 8]` float32 in 0..1 and labels `[N]` int64."""

    images: Tensor
    labels: Tensor

    def split(self, num_second: int, seed: int) -> tuple["Part", "Part"]:
        """Split off `num_second` images with the same share of each class."""
        first, second = train_test_split(
            np.arange(len(self.labels)), test_size=num_second, stratify=self.labels.numpy(), random_state=seed
        )
        return Part(self.images[first], self.labels[first]), Part(self.images[second], self.labels[second])


def load_parts(seed: int) -> dict[str, Part]:
    """Return the parts fit, validation, test, and calibration, which is a part of fit."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).to(torch.float32).unsqueeze(1)
    rest, test = Part(images, torch.from_numpy(digits.target)).split(NUM_TEST, seed)
    fit, validation = rest.split(NUM_VALIDATION, seed)
    return {"fit": fit, "validation": validation, "test": test, "calibration": fit.split(NUM_CALIBRATION, seed)[1]}


def augment_images(images: Tensor) -> Tensor:
    """Turn by up to 8 degrees, scale by up to 8 % and shift by up to 0.6 pixels, per image."""
    num = len(images)
    uniform = torch.rand(4, num) * 2 - 1
    angle = uniform[0] * math.radians(8)
    scale = 1 + 0.08 * uniform[1]
    # The grid spans 2 over 8 pixels, so 0.6 pixels are 0.15.
    shift_x, shift_y = 0.15 * uniform[2], 0.15 * uniform[3]
    rows = [
        torch.stack([scale * angle.cos(), -scale * angle.sin(), shift_x], dim=1),
        torch.stack([scale * angle.sin(), scale * angle.cos(), shift_y], dim=1),
    ]
    grid = functional.affine_grid(torch.stack(rows, dim=1), [num, 1, 8, 8], align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


@torch.inference_mode()
def measure_top1(model: DigitsVit, part: Part) -> float:
    """Return the share of images whose largest logit is at the label."""
    model.eval()
    return float((model(part.images).argmax(dim=1) == part.labels).float().mean())


def train_model(fit: Part, validation: Part, num_epochs: int) -> DigitsVit:
    """Train for `num_epochs` with AdamW on a one-cycle schedule and keep the last weights."""
    model = DigitsVit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps_per_epoch = math.ceil(len(fit.labels) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, epochs=num_epochs, steps_per_epoch=steps_per_epoch, pct_start=0.15
    )
    for epoch in range(1, num_epochs + 1):
        model.train()
        total_loss = 0.0
        for batch in torch.randperm(len(fit.labels)).split(BATCH_SIZE):
            logits = model(augment_images(fit.images[batch]))
            loss = functional.cross_entropy(logits, fit.labels[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total_loss += loss.item()
        top1 = measure_top1(model, validation)
        print(f"epoch {epoch:3d}/{num_epochs}: loss {total_loss / steps_per_epoch:.3f}, validation top-1 {top1:.4f}")
    return model.eval()


def export_model(model: DigitsVit, path: Path) -> None:
    """Write `model` to `path` with a dynamic batch and the weights inside the file."""
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        dynamo=True,
        opset_version=OPSET,
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes={"image": {0: torch.export.Dim("batch")}},
        verbose=False,
    )
    assert program is not None
    # The exporter notes the source file of every node; those paths would make the bytes depend on the machine.
    ClearMetadataAndDocStringPass()(program.model)
    onnx_ir.save(program.model, path)


@torch.inference_mode()
def compare_with_torch(model: DigitsVit, path: Path, images: Tensor) -> float:
    """Return the largest absolute difference of the logits between ONNX Runtime and torch at batch 1, 7 and 64."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    errors = []
    for num in (1, 7, 64):
        (actual,) = session.run(["logits"], {"image": images[:num].numpy()})
        errors.append(float(np.abs(actual - model(images[:num]).numpy()).max()))
    return max(errors)


def main() -> None:
    """Train, export, compare, report."""
    parser = argparse.ArgumentParser(description="Train and export the digits vision transformer.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write (default: here)")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    output: Path = args.output

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    # Sums are cut by thread, so another number of threads gives other last digits and in the end another model.
    torch.set_num_threads(2)
    parts = load_parts(args.seed)
    model = train_model(parts["fit"], parts["validation"], args.epochs)

    (output / "calibration").mkdir(parents=True, exist_ok=True)
    export_model(model, output / "model.onnx")
    np.savez_compressed(output / "calibration" / "model.npz", image=parts["calibration"].images.numpy())
    test = parts["test"]
    np.savez_compressed(output / "eval.npz", image=test.images.numpy(), labels=test.labels.numpy())

    error = compare_with_torch(model, output / "model.onnx", parts["validation"].images)
    if not error <= MAX_EXPORT_ERROR:
        raise SystemExit(f"model.onnx differs from torch by {error:.1e}, more than {MAX_EXPORT_ERROR:.0e}")
    num_parameters = sum(p.numel() for p in model.parameters())
    num_bytes = (output / "model.onnx").stat().st_size
    print(f"{num_parameters:,} parameters, model.onnx {num_bytes:,} bytes, max error {error:.1e} against torch")
    print(f"test top-1 {measure_top1(model, test):.4f} over {len(test.labels)} images")


if __name__ == "__main__":
    main()
