"""A text model of a few rows, its tokenizer, and the answers that a front has to give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from packaging_cases import Case, weights
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "blue", "one", "two", "three", "four", "five"]
BEGIN, END = 2, 3
# Of each text: rows [tokens, 4], their products with each other [tokens, tokens], the mean row [4] and one number [].
GRAPH = """words (int64[batch,seq] input_ids, int64[batch,seq] attention_mask)
=> (float[batch,seq,4] hidden, float[batch,seq,seq] products, float[batch,4] embedding, float[batch] score) {
    rows = Gather(table, input_ids)
    mask = Cast<to = 1>(attention_mask)
    column = Unsqueeze(mask, last)
    hidden = Mul(rows, column)
    turned = Transpose<perm = [0, 2, 1]>(hidden)
    products = MatMul(hidden, turned)
    total = ReduceSum<keepdims = 0>(hidden, middle)
    count = ReduceSum<keepdims = 1>(mask, middle)
    embedding = Div(total, count)
    score = ReduceSum<keepdims = 0>(embedding, middle)
}"""
PROFILE = """dims: {batch: {min: 1, opt: 4, max: 8}, seq: {min: 1, opt: 8, max: 16}}
inputs: {input_ids: [batch, seq], attention_mask: [batch, seq]}
"""
# The model does not check that a token is in its table before it runs: the table is computed.
LATE_GRAPH = GRAPH.replace(
    "rows = Gather(table, input_ids)",
    """whole = Cast<to = 1>(attention_mask)
    sum = ReduceSum<keepdims = 0>(whole)
    nothing = Sub(sum, sum)
    late = Add(table, nothing)
    rows = Gather(late, input_ids)""",
)
TABLE = weights(len(WORDS), 4)
CONSTANTS = {"table": TABLE, "last": np.array([2], np.int64), "middle": np.array([1], np.int64)}
ENCODER = Case(GRAPH, CONSTANTS, profile=PROFILE)
# One text at a time, of int32, with the types of its tokens.
TYPED_ENCODER = Case(
    """typed (int32[1,seq] input_ids, int32[1,seq] attention_mask, int32[1,seq] token_type_ids) => (float[1,seq,4] y) {
        rows = Gather(table, input_ids)
        product = Mul(attention_mask, token_type_ids)
        types = Cast<to = 1>(product)
        column = Unsqueeze(types, last)
        y = Add(rows, column)
    }""",
    {"table": TABLE, "last": np.array([2], np.int64)},
    profile="dims: {seq: {min: 3, opt: 8, max: 8}}\n"
    "inputs: {input_ids: [1, seq], attention_mask: [1, seq], token_type_ids: [1, seq]}\n",
)
LATE_ENCODER = Case(LATE_GRAPH, CONSTANTS, profile=PROFILE)


def save_tokenizer(
    folder: Path, words: Sequence[str] = WORDS, unknown: str = "[UNK]", has_ends: bool = True
) -> Tokenizer:
    """`folder/tokenizer.json`: one token a word; the folder is made.

    Args:
        folder: takes the file.
        words: in the order of their ids.
        unknown: the token of every other word; where it is none of the words, other words cannot be tokenized.
        has_ends: texts begin with [CLS] and end with [SEP].
    """
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = Whitespace()
    if has_ends:
        special = [("[CLS]", BEGIN), ("[SEP]", END)]
        # Words have type 1, the tokens around them 0.
        tokenizer.post_processor = TemplateProcessing(single="[CLS]:0 $A:1 [SEP]:0", special_tokens=special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def ids_of(text: str) -> list[int]:
    return [BEGIN, *(WORDS.index(word) if word in WORDS else 1 for word in text.split()), END]


def expected(texts: Sequence[str]) -> dict[str, np.ndarray]:
    """What the front answers, computed from the table in float64."""
    rows = [TABLE[ids_of(text)].astype(np.float64) for text in texts]
    longest = max(map(len, rows))
    hidden = np.zeros((len(rows), longest, 4))
    products = np.zeros((len(rows), longest, longest))
    for index, row in enumerate(rows):
        hidden[index, : len(row)] = row
        products[index, : len(row), : len(row)] = row @ row.T
    embedding = np.stack([row.mean(axis=0) for row in rows])
    mask = np.arange(longest) < np.array([[len(row)] for row in rows])
    return {
        "hidden": hidden,
        "products": products,
        "embedding": embedding,
        "score": embedding.sum(axis=1, keepdims=True),
        "attention_mask": mask.astype(np.int64),
    }
