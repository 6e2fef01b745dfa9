"""Make EfficientNet-Lite0's calibration and evaluation data: `python make_data.py OUTPUT_FOLDER`.

The images are square crops of 14 photographs that ship inside scikit-image and scikit-learn. The rule has no
randomness. Each photograph is cut in two at 40 % of its width: crops of the first part calibrate, crops of the
second evaluate, so no pixel is in both. Crops lie on fixed grids at three scales, each also mirrored; every run of 14
neighbours in a file holds one crop of each photograph.

    calib.npz  image [256, 3, 224, 224] float32
    eval.npz   image [532, 3, 224, 224] float32

Needs scikit-image, scikit-learn and Pillow (which scikit-image brings), not torch.
"""

import argparse
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 224
# The mean and standard deviation of the weights' own pipeline (Lite models: symmetric, near [-1, 1]).
MEAN, STD = 127.0, 128.0
CALIBRATION_SHARE = 0.4
PHOTOGRAPHS = (
    ("skimage.data", "astronaut.png"),
    ("skimage.data", "brick.png"),
    ("skimage.data", "camera.png"),
    ("skimage.data", "chelsea.png"),
    ("skimage.data", "clock_motion.png"),
    ("skimage.data", "coffee.png"),
    ("skimage.data", "coins.png"),
    ("skimage.data", "grass.png"),
    ("skimage.data", "gravel.png"),
    ("skimage.data", "moon.png"),
    ("skimage.data", "motorcycle_left.png"),
    ("skimage.data", "rocket.jpg"),
    ("sklearn.datasets.images", "china.jpg"),
    ("sklearn.datasets.images", "flower.jpg"),
)
# (side of the square as a share of the part's shorter side, places along the longer side, along the shorter side).
GRIDS = ((1.0, 5, 1), (0.85, 3, 2), (0.7, 4, 2))
NUM_CALIBRATION = 256
NUM_EVALUATION = 532


def read_photograph(package: str, name: str) -> Image.Image:
    """Read one packaged photograph as RGB; none of them is higher than wide."""
    with as_file(files(package) / name) as path, Image.open(path) as image:
        return image.convert("RGB")


def split_photograph(image: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Cut in two: the left part calibrates, the right part evaluates."""
    edge = round(CALIBRATION_SHARE * image.width)
    return image.crop((0, 0, edge, image.height)), image.crop((edge, 0, image.width, image.height))


def crop_part(part: Image.Image) -> Iterator[NDArray[np.uint8]]:
    """Yield the crops of one part, each then mirrored, uint8 `[224, 224, 3]`."""
    short, is_wide = min(part.size), part.width >= part.height
    for share, num_long, num_short in GRIDS:
        side = round(share * short)
        num_x, num_y = (num_long, num_short) if is_wide else (num_short, num_long)
        for y in np.linspace(0, part.height - side, num_y).round().astype(int).tolist():
            for x in np.linspace(0, part.width - side, num_x).round().astype(int).tolist():
                crop = part.crop((x, y, x + side, y + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                pixels = np.asarray(crop)
                yield pixels
                yield pixels[:, ::-1]


def make_batch(parts: list[Image.Image], num_images: int) -> NDArray[np.float32]:
    """Take crops of each part in turn, scaled as the model was trained, float32 `[num_images, 3, 224, 224]`."""
    rounds = zip(*(crop_part(part) for part in parts), strict=True)
    pixels = np.stack([crop for crops in rounds for crop in crops][:num_images])
    return (pixels.transpose(0, 3, 1, 2).astype(np.float32) - MEAN) / STD


def make_data() -> dict[str, NDArray[np.float32]]:
    """Return the images of `calib` and `eval`."""
    parts = [split_photograph(read_photograph(package, name)) for package, name in PHOTOGRAPHS]
    return {
        "calib": make_batch([left for left, _ in parts], NUM_CALIBRATION),
        "eval": make_batch([right for _, right in parts], NUM_EVALUATION),
    }


def main() -> None:
    """Crop, scale, save."""
    parser = argparse.ArgumentParser(description="Make EfficientNet-Lite0's calib.npz and eval.npz.")
    parser.add_argument("output", type=Path, help="the folder to write calib.npz and eval.npz into")
    folder: Path = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, images in make_data().items():
        np.savez(folder / f"{name}.npz", image=images)
        print(f"{folder / name}.npz: {len(images)} crops of {len(PHOTOGRAPHS)} photographs")


if __name__ == "__main__":
    main()
