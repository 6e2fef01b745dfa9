"""Make the models and data of PP-OCRv4 text detection and recognition: `python make_data.py OUTPUT_FOLDER`.

The models are those of the installed package `rapidocr-onnxruntime`; the images are English text, rendered with the
font that ships in Pillow on plain colours and on photographs that ship in scikit-image and scikit-learn. The rule has
no randomness: words are those of Python's language reference in the order of their sha256 (another Python version has
other words), colours, sizes and places go round in fixed cycles.

    det/det.onnx   x [B, 3, H, W] float32, H and W multiples of 32 -> text probability of each pixel [B, 1, H, W]
    det/calib.npz  x [48, 3, 480, 480]; det/eval.npz  x [48, 3, 480, 480]: pages of about 60 words
    rec/rec.onnx   x [B, 3, 48, W] float32 -> character probabilities [B, W / 8, 6625]
    rec/calib.npz  x [256, 3, 48, 320]; rec/eval.npz  x [200, 3, 48, 320]: one word each

No word, photograph region or page is in both files of a model. Needs no torch.
"""

import argparse
import hashlib
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.resources import as_file, files
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

NUM_CALIBRATION_PAGES = 48
NUM_EVALUATION_PAGES = 48
NUM_CALIBRATION_WORDS = 256
NUM_EVALUATION_WORDS = 200
PAGE_SIDE = 480
# The recogniser's own input: lines 48 high, padded on the right to at least 320 (rapidocr's `rec_img_shape`).
WORD_HEIGHT, WORD_WIDTH = 48, 320
WORD_LETTERS = range(3, 14)
MARGIN = 6
FONT_SIZES = (16, 40, 22, 30, 18, 26, 48)
INKS = ((0, 0, 0), (20, 30, 120), (250, 250, 250), (130, 20, 20), (255, 220, 60), (10, 90, 40))
PAPERS = ((255, 255, 255), (235, 228, 205), (30, 34, 50), (200, 215, 230), (60, 20, 60), (245, 200, 190))
# The left half of each photograph backs calibration, the right half evaluation.
PHOTOGRAPHS = (
    ("skimage.data", "chelsea.png"),
    ("skimage.data", "coffee.png"),
    ("skimage.data", "motorcycle_left.png"),
    ("sklearn.datasets.images", "china.jpg"),
    ("sklearn.datasets.images", "flower.jpg"),
)
MODELS = {"det": "ch_PP-OCRv4_det_infer.onnx", "rec": "ch_PP-OCRv4_rec_infer.onnx"}


def collect_words() -> list[str]:
    """Return the distinct words of the language reference, in the order of their sha256."""
    words = {word for topic in topics.values() for word in re.findall(r"[A-Za-z]+", topic)}
    fitting = (word for word in words if len(word) in WORD_LETTERS)
    return sorted(fitting, key=lambda word: hashlib.sha256(word.encode()).hexdigest())


def read_backgrounds(is_calibration: bool) -> list[Image.Image]:
    """Read one half of each photograph, darkened and lightened in turn so that text can stand out."""
    halves = []
    for index, (package, name) in enumerate(PHOTOGRAPHS):
        with as_file(files(package) / name) as path, Image.open(path) as image:
            rgb = image.convert("RGB")
        middle = rgb.width // 2
        half = rgb.crop((0, 0, middle, rgb.height) if is_calibration else (middle, 0, rgb.width, rgb.height))
        halves.append(half.point([(value + 255 * (index % 2)) // 2 for value in range(256)] * 3))
    return halves


def is_dark(colour: tuple[int, ...]) -> bool:
    """Tell whether light ink shows better on a colour."""
    return sum(colour) < 3 * 128


def make_canvases(width: int, height: int, is_calibration: bool) -> Iterator[Image.Image]:
    """Yield backgrounds without end: two plain papers, then a photograph."""
    photographs = cycle(read_backgrounds(is_calibration))
    papers = cycle(PAPERS)
    while True:
        for _ in range(2):
            yield Image.new("RGB", (width, height), next(papers))
        yield next(photographs).resize((width, height), Image.Resampling.BICUBIC)


def choose_ink(canvas: Image.Image, index: int) -> tuple[int, int, int]:
    """Take the next ink that stands out from the canvas's mean colour."""
    mean = canvas.resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    assert isinstance(mean, tuple)
    readable = [ink for ink in INKS if is_dark(ink) != is_dark(mean)]
    return readable[index % len(readable)]


def render_page(canvas: Image.Image, words: Iterator[str], index: int) -> Image.Image:
    """Fill a canvas with ragged lines of one to five words, sizes going round; turn every fourth page a little."""
    draw = ImageDraw.Draw(canvas)
    ink = choose_ink(canvas, index)
    y = MARGIN + 7 * (index % 5)
    for line, size in enumerate(islice(cycle(FONT_SIZES), index, None)):
        font = ImageFont.load_default(size)
        text = " ".join(islice(words, 1 + (index + 2 * line) % 5))
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        if y + bottom - top > canvas.height - MARGIN:
            break
        # A line that is too long runs over the edge, as lines of photographed pages do.
        x = MARGIN + (37 * (line + index)) % max(1, int(canvas.width - (right - left) - 2 * MARGIN))
        draw.text((x - left, y - top), text, font=font, fill=ink)
        y += int(bottom - top) + size // 2 + 4 * (line % 4)
    if index % 4 == 3:
        angle = 4 if index % 8 == 3 else -4
        canvas = canvas.rotate(angle, Image.Resampling.BICUBIC, fillcolor=canvas.getpixel((0, 0)))
    return canvas


def render_word(word: str, canvas: Image.Image, index: int) -> NDArray[np.uint8]:
    """Write one word, cut tightly and scale to the recogniser's height, uint8 `[48, W <= 320, 3]`."""
    font = ImageFont.load_default(FONT_SIZES[index % len(FONT_SIZES)])
    draw = ImageDraw.Draw(canvas)
    left, top, right, bottom = (round(edge) for edge in draw.textbbox((MARGIN, MARGIN), word, font=font))
    box = (left - 3, top - 3, right + 3, bottom + 3)
    draw.text((MARGIN, MARGIN), word, font=font, fill=choose_ink(canvas.crop(box), index))
    width = min(WORD_WIDTH, round((box[2] - box[0]) * WORD_HEIGHT / (box[3] - box[1])))
    return np.asarray(canvas.crop(box).resize((width, WORD_HEIGHT), Image.Resampling.BICUBIC))


def scale_pixels(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn RGB uint8 `[H, W, 3]` into the models' BGR float32 `[3, H, W]` in [-1, 1]."""
    return (pixels[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) / 255 - 0.5) / 0.5


def make_pages(words: list[str], num_pages: int, is_calibration: bool) -> NDArray[np.float32]:
    """Render pages, float32 `[num_pages, 3, 480, 480]`."""
    endless = cycle(words)
    canvases = islice(make_canvases(PAGE_SIDE, PAGE_SIDE, is_calibration), num_pages)
    pages = [render_page(canvas, endless, index) for index, canvas in enumerate(canvases)]
    return np.stack([scale_pixels(np.asarray(page)) for page in pages])


def make_words(words: list[str], is_calibration: bool) -> NDArray[np.float32]:
    """Render words, padded with zeros on the right as the recogniser's own code does, float32 `[N, 3, 48, 320]`."""
    batch = np.zeros((len(words), 3, WORD_HEIGHT, WORD_WIDTH), dtype=np.float32)
    for index, (word, canvas) in enumerate(zip(words, make_canvases(512, 72, is_calibration), strict=False)):
        image = scale_pixels(render_word(word, canvas, index))
        batch[index, :, :, : image.shape[2]] = image
    return batch


def split_words() -> tuple[list[str], list[str]]:
    """Return the words of calibration and those of evaluation, none in common whatever their case."""
    words = collect_words()
    halves: tuple[list[str], list[str]] = ([], [])
    for word in words:
        halves[hashlib.sha256(word.lower().encode()).digest()[0] % 2].append(word)
    return halves


def make_data() -> dict[str, dict[str, NDArray[np.float32]]]:
    """Return the arrays `x` of `calib` and `eval` of both models."""
    calib, held_out = split_words()
    return {
        "det": {
            "calib": make_pages(calib, NUM_CALIBRATION_PAGES, is_calibration=True),
            "eval": make_pages(held_out, NUM_EVALUATION_PAGES, is_calibration=False),
        },
        "rec": {
            "calib": make_words(calib[:NUM_CALIBRATION_WORDS], is_calibration=True),
            "eval": make_words(held_out[:NUM_EVALUATION_WORDS], is_calibration=False),
        },
    }


def copy_model(name: str, folder: Path) -> Path:
    """Copy the packaged model `det` or `rec` into a folder; found without importing its package, which needs OpenCV."""
    packaged = distribution("rapidocr-onnxruntime").locate_file(f"rapidocr_onnxruntime/models/{MODELS[name]}")
    return Path(shutil.copyfile(str(packaged), folder / f"{name}.onnx"))


def main() -> None:
    """Copy the models, render, save."""
    parser = argparse.ArgumentParser(description="Make PP-OCRv4's models, calib.npz and eval.npz.")
    parser.add_argument("output", type=Path, help="the folder to write det/ and rec/ into")
    folder: Path = parser.parse_args().output
    for name, arrays in make_data().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        copy_model(name, folder / name)
        for part, array in arrays.items():
            np.savez(folder / name / f"{part}.npz", x=array)
            print(f"{folder / name / part}.npz: {len(array)} images of {array.shape[2]} x {array.shape[3]}")


if __name__ == "__main__":
    main()
