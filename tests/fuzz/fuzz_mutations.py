"""Seeded damage to files: bytes, truncation, protobuf fields, external data, YAML and arrays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message

Mutation = Callable[[Path, random.Random], None]
INTEGERS = (-1, 0, 1, 2, 3, 7, 16, 255, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e38, -1e38, float("inf"), float("nan"))
STRINGS = ("", "x", "../up", "/etc/passwd", "a\nb", "Softmax", "Loop", "com.microsoft", "\U0001f600", "y" * 300)
YAML_PIECES = (
    "-1",
    "0",
    "99999999999",
    "1.5",
    "null",
    "[]",
    "{}",
    "'x'",
    "!!python/object:os.system x",
    "&a [*a]",
    "\t",
)


def flip_bytes(path: Path, rng: random.Random) -> None:
    """Change a few bytes."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 2, 4, 16))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    """Cut the end off."""
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def insert_bytes(path: Path, rng: random.Random) -> None:
    """Insert random bytes somewhere."""
    data = path.read_bytes()
    place = rng.randrange(len(data) + 1)
    path.write_bytes(data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place:])


def mutate_fields(path: Path, rng: random.Random) -> None:
    """Valid protobuf with other content: some fields set, dropped, repeated or exchanged."""
    model = onnx.load(str(path), load_external_data=False)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(model))
        message, name = rng.choice(places)
        _change_field(message, name, rng, [text for text in _strings(model) if text])
    path.write_bytes(model.SerializeToString())


def _places(message: Message) -> Iterator[tuple[Message, str]]:
    """Every field that is set, at any depth."""
    for field, value in message.ListFields():
        yield message, field.name
        for part in value if field.is_repeated else [value]:
            if isinstance(part, Message):
                yield from _places(part)


def _strings(message: Message) -> Iterator[str]:
    for holder, name in _places(message):
        value = getattr(holder, name)
        yield from (
            [value] if isinstance(value, str) else [v for v in value if isinstance(v, str)] if _is_list(value) else []
        )


def _is_list(value: object) -> bool:
    return hasattr(value, "append") or hasattr(value, "add")


def _change_field(message: Message, name: str, rng: random.Random, texts: list[str]) -> None:
    value: Any = getattr(message, name)
    if not _is_list(value):
        if isinstance(value, Message) or rng.random() < 0.2:
            message.ClearField(name)
        else:
            enum = message.DESCRIPTOR.fields_by_name[name].enum_type
            # A closed enumeration takes its own values alone; others are left to the mutations of bytes.
            numbers = [entry.number for entry in enum.values] if enum is not None else []
            setattr(message, name, rng.choice(numbers) if numbers else _other(value, rng, texts))
        return
    action = rng.choice(("drop", "repeat", "swap", "change", "change"))
    index = rng.randrange(len(value))
    if action == "drop":
        del value[index]
    elif action == "repeat":
        value.extend([value[index]])
    elif action == "swap" and not isinstance(value[index], Message):
        other = rng.randrange(len(value))
        value[index], value[other] = value[other], value[index]
    elif not isinstance(value[index], Message):
        value[index] = _other(value[index], rng, texts)
    else:
        value[index].CopyFrom(value[rng.randrange(len(value))])


def _other(value: Any, rng: random.Random, texts: list[str]) -> Any:
    if isinstance(value, str):
        return rng.choice([*STRINGS, *texts])
    if isinstance(value, bytes):
        return rng.choice((b"", value[:-1], value + b"\0", value * 2))
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, int):
        number = rng.choice(INTEGERS)
        # 32-bit fields take no more.
        return number if -(2**31) <= number < 2**31 else 5
    return value


def edit_text(path: Path, rng: random.Random) -> None:
    """A profile with characters, numbers or lines changed."""
    text = path.read_text()
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(text) + 1)
        action = rng.choice(("cut", "insert", "number", "repeat"))
        if action == "cut":
            text = text[:place] + text[place + rng.randrange(1, 8) :]
        elif action == "insert":
            text = text[:place] + rng.choice(YAML_PIECES) + text[place:]
        elif action == "number":
            digits = [index for index, char in enumerate(text) if char.isdigit()]
            if digits:
                place = rng.choice(digits)
                text = text[:place] + rng.choice(YAML_PIECES) + text[place + 1 :]
        else:
            text = text[:place] + text[max(0, place - 20) :]
    path.write_text(text)


def spoil_weights(path: Path, rng: random.Random) -> None:
    """Weights with values that no training gives, or with another shape."""
    model = onnx.load(str(path), load_external_data=False)
    stored = [tensor for tensor in model.graph.initializer if tensor.HasField("raw_data")]
    for tensor in rng.sample(stored, min(len(stored), 2)):
        values = onnx.numpy_helper.to_array(tensor).copy()
        tensor.CopyFrom(onnx.numpy_helper.from_array(_spoil(values, rng), tensor.name))
    path.write_bytes(model.SerializeToString())


def spoil_arrays(path: Path, rng: random.Random) -> None:
    """Data with other values, shapes, types or names."""
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    for name in list(arrays):
        arrays[name] = _spoil(arrays[name], rng)
        if rng.random() < 0.2:
            arrays[rng.choice(("other", "labels", "../x", ""))] = arrays.pop(name)
    np.savez(path, **arrays)


def _spoil(values: np.ndarray, rng: random.Random) -> np.ndarray:
    action = rng.choice(("fill", "fill", "shape", "dtype", "empty", "text"))
    if action == "fill":
        number = rng.choice(FLOATS)
        return np.full_like(values, number) if values.dtype.kind == "f" else np.full_like(values, 127)
    if action == "shape":
        return values.reshape(values.shape[::-1])[..., None]
    if action == "empty":
        return values[:0]
    kinds = (np.float64, np.float16, np.int8, np.bool_, np.complex64)
    return values.astype(rng.choice(kinds)) if action == "dtype" else np.array(["a", "b"])


MODEL_MUTATIONS: tuple[Mutation, ...] = (
    *(mutate_fields,) * 6,
    spoil_weights,
    spoil_weights,
    flip_bytes,
    truncate,
    insert_bytes,
)
PROFILE_MUTATIONS: tuple[Mutation, ...] = (edit_text, edit_text, edit_text, flip_bytes, truncate)
ARRAY_MUTATIONS: tuple[Mutation, ...] = (*(spoil_arrays,) * 4, flip_bytes, truncate)
EXTERNAL_MUTATIONS: tuple[Mutation, ...] = (flip_bytes, truncate, insert_bytes)


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage one file of a case; says which and how."""
    kind = rng.choice(("model", "model", "model", "model", "profile", "data"))
    if kind == "model" and (folder / "model.data").exists() and rng.random() < 0.3:
        name, mutations = "model.data", EXTERNAL_MUTATIONS
    else:
        name, mutations = {
            "model": ("model.onnx", MODEL_MUTATIONS),
            "profile": ("profile.yaml", PROFILE_MUTATIONS),
            "data": ("data.npz", ARRAY_MUTATIONS),
        }[kind]
    mutation = rng.choice(mutations)
    mutation(folder / name, rng)
    return f"{mutation.__name__} {name}"
