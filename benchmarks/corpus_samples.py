"""Samples for the models of the corpus: 16 to calibrate with, 16 others to evaluate with, as folders of `.npz` files.

Natural ones are crops of photographs (from scikit-image and scikit-learn), English text (Python's own help pages) and
bytes of Python's sources. Where no packaged data fits, they are synthetic: speech-like sound, rendered text, random
identifiers and features. Each file is one feed; models that take a batch get files of 1, 3, 4 and 8 samples, so that
the ranges derived from them have a batch. All of it is seeded by the model's name and the file's number.
"""

import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SAMPLES = 16
BATCHES = (1, 3, 4, 8)
SINGLES = (1,) * SAMPLES
SPLITS = ("calib", "eval")
PHOTOGRAPHS = (
    ("skimage.data", "astronaut.png"),
    ("skimage.data", "chelsea.png"),
    ("skimage.data", "coffee.png"),
    ("skimage.data", "motorcycle_left.png"),
    ("skimage.data", "rocket.jpg"),
    ("sklearn.datasets.images", "china.jpg"),
    ("sklearn.datasets.images", "flower.jpg"),
)

Array = NDArray[Any]
Feed = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Draw:
    """What one file of samples is made from.

    Attributes:
        rng: seeded by model, split and file.
        split: "calib" or "eval"; natural sources are cut in two, so that no sample is in both.
        batch: number of samples.
        index: of the file within its split.
    """

    rng: np.random.Generator
    split: str
    batch: int
    index: int

    def choose(self, values: Sequence[int]) -> int:
        """Return one of some sizes, the same for the n-th file of each split, so that both have the same ranges."""
        return values[self.index % len(values)]


MakeFeed = Callable[[Draw], Feed]


@cache
def read_photograph(package: str, name: str) -> Image.Image:
    """Read one packaged photograph as RGB."""
    with as_file(files(package) / name) as path, Image.open(path) as image:
        return image.convert("RGB")


def images(draw: Draw, height: int, width: int) -> NDArray[np.float32]:
    """Return crops of photographs, RGB 0..255 `[batch, height, width, 3]`; left parts calibrate, right evaluate."""
    crops = []
    for _ in range(draw.batch):
        photo = read_photograph(*PHOTOGRAPHS[draw.rng.integers(len(PHOTOGRAPHS))])
        edge = round(0.45 * photo.width)
        left, right = (0, edge) if draw.split == "calib" else (edge, photo.width)
        side = int(min(right - left, photo.height) * draw.rng.uniform(0.6, 1.0))
        x = int(draw.rng.integers(left, right - side + 1))
        y = int(draw.rng.integers(0, photo.height - side + 1))
        crop = photo.crop((x, y, x + side, y + side)).resize((width, height), Image.Resampling.BICUBIC)
        crops.append(np.asarray(crop, np.float32))
    return np.stack(crops)


def planar(pixels: NDArray[np.float32], scale: float = 1 / 255, offset: float = 0.0) -> NDArray[np.float32]:
    """Return `[batch, 3, height, width]`, scaled and then shifted."""
    return np.ascontiguousarray((pixels * scale + offset).transpose(0, 3, 1, 2), np.float32)


def text_lines(draw: Draw, height: int, width: int) -> NDArray[np.float32]:
    """Return lines of text rendered in black on light paper, RGB 0..255 `[batch, height, width, 3]`."""
    font = ImageFont.load_default(size=height * 0.6)
    pages = []
    for line in sentences(draw, draw.batch):
        shade = int(draw.rng.integers(200, 256))
        page = Image.new("RGB", (width, height), (shade, shade, shade))
        ImageDraw.Draw(page).text((4, height * 0.15), line, fill=(0, 0, int(draw.rng.integers(90))), font=font)
        pages.append(np.asarray(page, np.float32) + draw.rng.normal(0, 4, (height, width, 3)))
    return np.stack(pages).clip(0, 255).astype(np.float32)


def speech(draw: Draw, samples: int, rate: int = 16000) -> NDArray[np.float32]:
    """Return speech-like sound `[batch, samples]` in -1..1: harmonics under moving formants, syllables, noise."""
    seconds = np.arange(samples) / rate
    sounds = []
    for _ in range(draw.batch):
        rng = draw.rng
        pitch = rng.uniform(90, 240) * (1 + 0.1 * np.sin(2 * np.pi * rng.uniform(0.4, 2) * seconds + rng.uniform(0, 6)))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        sound = np.zeros(samples)
        for formant in (rng.uniform(300, 800), rng.uniform(900, 2200), rng.uniform(2300, 3200)):
            center = formant * (1 + 0.2 * np.sin(2 * np.pi * rng.uniform(1, 4) * seconds + rng.uniform(0, 6)))
            for harmonic in range(1, 24):
                sound += np.exp(-(((harmonic * pitch - center) / 180) ** 2)) * np.sin(harmonic * phase)
        syllables = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * seconds + rng.uniform(0, 6)) + 0.3, 0, 1)
        sound = sound * syllables + rng.normal(0, 0.02 + 0.2 * rng.random() * (1 - syllables), samples)
        sounds.append(sound / max(np.abs(sound).max(), 1e-6) * rng.uniform(0.2, 0.9))
    return np.stack(sounds).astype(np.float32)


def spectrogram(
    draw: Draw, frames: int, bins: int, window: int = 512, hop: int = 160, mel: bool = True
) -> NDArray[np.float32]:
    """Return the natural logarithm of the power of speech-like sound, `[batch, frames, bins]`."""
    sound = speech(draw, window + hop * (frames - 1))
    starts = np.arange(frames) * hop
    cut = sound[:, starts[:, None] + np.arange(window)] * np.hanning(window)
    power = np.abs(np.fft.rfft(cut)) ** 2
    return np.log((power @ make_mel(power.shape[-1], bins) if mel else power[..., :bins]) + 1e-7).astype(np.float32)


@cache
def make_mel(bins: int, bands: int, rate: int = 16000) -> NDArray[np.float64]:
    """Return triangular mel filters `[bins, bands]`."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    frequencies = np.linspace(0, rate / 2, bins)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.clip(np.minimum(rising, falling), 0, None)


@cache
def read_sentences(split: str) -> tuple[str, ...]:
    """Return lines of Python's help pages: the even ones calibrate, the odd ones evaluate."""
    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines()]
    prose = [line for line in lines if len(line.split()) >= 6]
    return tuple(prose[0::2] if split == "calib" else prose[1::2])


def sentences(draw: Draw, number: int) -> list[str]:
    """Return lines of English text."""
    lines = read_sentences(draw.split)
    return [lines[i] for i in draw.rng.integers(len(lines), size=number)]


def tokens(draw: Draw, tokenizer: Any, length: int) -> tuple[Array, Array]:
    """Return token ids and attention mask, int64 `[batch, length]` each, of English text."""
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    texts = [" ".join(sentences(draw, 1 + length // 12)) for _ in range(draw.batch)]
    found = tokenizer.encode_batch(texts)
    return np.array([entry.ids for entry in found], np.int64), np.array(
        [entry.attention_mask for entry in found], np.int64
    )


def ids(draw: Draw, shape: Sequence[int], vocabulary: int, first: int = 1, dtype: Any = np.int64) -> Array:
    """Return identifiers in `first..vocabulary-1`, frequent and rare ones as in text (Zipf)."""
    ranks = draw.rng.zipf(1.3, size=tuple(shape)) % (vocabulary - first)
    return (draw.rng.permutation(vocabulary - first)[ranks] + first).astype(dtype)


def noise(draw: Draw, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Return normally distributed features."""
    return draw.rng.normal(0, scale, shape).astype(np.float32)


@cache
def list_sources(split: str) -> tuple[Path, ...]:
    """Return Python's own source files: the even ones calibrate, the odd ones evaluate."""
    found = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size > 4096)
    return tuple(found[0::2] if split == "calib" else found[1::2])


def file_bytes(draw: Draw, number: int) -> NDArray[np.int32]:
    """Return the first and the last `number // 2` bytes of source files, `[batch, number]`."""
    paths = list_sources(draw.split)
    rows = []
    for i in draw.rng.integers(len(paths), size=draw.batch):
        content = np.frombuffer(paths[i].read_bytes(), np.uint8)
        rows.append(np.concatenate([content[: number // 2], content[-(number - number // 2) :]]))
    return np.stack(rows).astype(np.int32)


def make_draws(name: str, split: str, batches: Sequence[int]) -> Iterator[Draw]:
    """Yield what each file of one split is made from."""
    for index, batch in enumerate(batches):
        seed = zlib.crc32(f"{name}/{split}/{index}".encode())
        yield Draw(np.random.default_rng(seed), split, batch, index)


def write_samples(name: str, make: MakeFeed, batches: Sequence[int], folder: Path) -> None:
    """Write `folder/calib/*.npz` and `folder/eval/*.npz`, 16 samples each, where they are not there yet."""
    for split in SPLITS:
        target = folder / split
        if target.exists():
            continue
        partial = folder / f".{split}"
        partial.mkdir(parents=True, exist_ok=True)
        for draw in make_draws(name, split, batches):
            np.savez(partial / f"{draw.index:02}.npz", **make(draw))  # type: ignore[arg-type]  # inputs, not options
        partial.rename(target)
