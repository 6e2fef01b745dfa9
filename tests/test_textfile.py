from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from trtforge.errors import InputError
from trtforge.limits import Limits
from trtforge.textfile import FileModel, kind_of, parse_json, parse_yaml, read_text, validate


class Inner(FileModel):
    size: int = 0


class Outer(FileModel):
    name: str
    kind: Literal["a", "b"] = "a"
    inner: Inner = Inner()
    ratio: float = 0.0


def test_text_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("größe: 1", encoding="utf-8")
    assert parse_yaml(read_text(tmp_path / "f", "profile"), "f") == {"größe": 1}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recipe .*nothing does not exist"):
        read_text(tmp_path / "nothing", "recipe")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read\nwhy: Is a directory"):
        read_text(tmp_path, "recipe")


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="it is not UTF-8 text"):
        read_text(tmp_path / "f", "recipe")


def test_size_is_bounded_and_the_limit_itself_allowed(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 100)
    assert len(read_text(tmp_path / "f", "recipe", Limits(text_bytes=100))) == 100
    with pytest.raises(InputError, match="more than 99 bytes") as caught:
        read_text(tmp_path / "f", "recipe", Limits(text_bytes=99))
    assert "--limit text_bytes=" in caught.value.fix


def test_a_device_without_end_is_bounded_too() -> None:
    """In a process of its own, whose memory is bounded too: reading on would take all of the machine's."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
from pathlib import Path
from trtforge.textfile import InputError, Limits, read_text
try:
    read_text(Path("/dev/zero"), "recipe", Limits(text_bytes=1000))
except InputError as err:
    print(err.what)
"""
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert result.stdout == "recipe /dev/zero is too large\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\na: 2", "duplicate key 'a' (line 2, column 1)"),
        ("x: {a: 1, a: 1}", "duplicate key 'a'"),
        ("a: &x [1]\nb: *x", "aliases (*name) are not allowed (line 2, column 4)"),
        ("a: !!python/object/apply:os.system [ls]", "tags (!name) are not allowed (line 1, column 4)"),
        ("? !!set {a}\n: 1", "tags (!name) are not allowed"),
        ("a: !!int ''", "tags (!name) are not allowed"),
        ("? [1]\n: 2", "a key must be a plain value"),
        ("? {a: 1}\n: 2", "a key must be a plain value"),
        ("a: [1", "line 1"),
        ("a: 1\n---\nb: 2", "another document (line 2"),
        ("a: \x00", "unacceptable character"),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: " + "9" * 5000, "4300 digits"),
        ("<<: {a: 1}", "merge"),
    ],
)
def test_hostile_or_broken_yaml_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(InputError, match="profile p is not valid YAML") as caught:
        parse_yaml(text, "profile p")
    assert why in caught.value.why
    assert "\n" not in caught.value.why


def test_yaml_depth_is_bounded_and_the_bound_can_be_raised() -> None:
    text = "[" * 40 + "]" * 40
    with pytest.raises(InputError, match="nested deeper than 32 levels"):
        parse_yaml(text, "f")
    assert parse_yaml(text, "f", Limits(text_depth=40))
    with pytest.raises(InputError, match="not valid YAML"):
        parse_yaml("[" * 100_000, "f", Limits(text_depth=10**6))


def test_depth_counts_levels_not_siblings() -> None:
    assert len(parse_yaml("".join(f"k{i}: [{i}]\n" for i in range(100)), "f")) == 100


def test_an_alias_bomb_is_refused_before_it_expands() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(InputError, match="aliases"):
        parse_yaml("\n".join(lines), "f")


def test_random_yaml_never_raises_anything_but_input_error() -> None:
    pieces = [
        "{",
        "}",
        "[",
        "]",
        ":",
        " ",
        "\n",
        "- ",
        "? ",
        "a",
        "1",
        "!!int",
        "!",
        "&x",
        "*x",
        "<<",
        "=",
        "~",
        "'",
        '"',
    ]
    pieces += [
        "|",
        ">",
        "%",
        "@",
        "0x_",
        "0b",
        "1:60",
        ".inf",
        "2001-01-01",
        "\t",
        "#",
        "---",
        "...",
        "é",
        "\ufeff",
        "\x07",
    ]
    generator = random.Random(3)
    refused = 0
    for _ in range(3000):
        text = "".join(generator.choices(pieces, k=generator.randint(1, 12)))
        try:
            parse_yaml(text, "f")
        except InputError:
            refused += 1
    assert 500 < refused < 2900


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": -Infinity}', "-Infinity is not a JSON number"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("{", "line 1"),
        ("", "line 1"),
        ("[" * 200_000, "recursion"),
        ("1" * 5000, "4300 digits"),
    ],
)
def test_hostile_or_broken_json_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match="t is not valid JSON") as caught:
        parse_json(text, "t")
    assert why in caught.value.why


def test_json_is_read() -> None:
    assert parse_json('{"b": [1, null], "a": {"c": 1.5}}', "t") == {"b": [1, None], "a": {"c": 1.5}}


def test_every_problem_of_a_file_is_named_at_once() -> None:
    with pytest.raises(InputError, match="f has 4 problems") as caught:
        validate(Outer, {"kind": "c", "inner": {"size": "x", "depth": 1}}, "f")
    for problem in (
        "missing key 'name'",
        "kind: Input should be 'a' or 'b'",
        "inner.size: ",
        "unknown key 'inner.depth'",
    ):
        assert problem in caught.value.why
    assert caught.value.fix == "allowed keys at the top level: name, kind, inner, ratio"


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_file_that_holds_no_mapping_is_refused_with_the_keys(value: object) -> None:
    with pytest.raises(InputError, match="f does not hold a mapping") as caught:
        validate(Outer, value, "f")
    assert f"found {type(value).__name__}; expected the keys name, kind, inner, ratio" in caught.value.why


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_file_values_are_finite(value: float) -> None:
    with pytest.raises(InputError, match="ratio: Input should be a finite number"):
        validate(Outer, {"name": "x", "ratio": value}, "f")


def test_many_problems_are_cut_to_eight() -> None:
    with pytest.raises(InputError, match="f has 21 problems") as caught:
        validate(Outer, {f"k{i}": i for i in range(20)}, "f")
    assert caught.value.why.count(";") == 7


def test_file_values_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Outer(name="x").name = "y"  # type: ignore[misc]


def test_what_lies_at_a_path_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert kind_of(tmp_path, "data") == "folder"
    assert kind_of(tmp_path / "file", "data") == kind_of(tmp_path / "link", "data") == "file"
    assert kind_of(Path("/dev/null"), "data") == "other"
    assert kind_of(tmp_path / "none", "data") is kind_of(tmp_path / "file" / "below", "data") is None


@pytest.mark.parametrize(
    ("name", "why"),
    [("n" * 300, "File name too long"), ("loop", "Too many levels of symbolic links"), ("a\0b", "null")],
)
def test_a_path_that_the_system_cannot_look_at_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"^data .* cannot be read") as caught:
        kind_of(tmp_path / name, "data")
    assert why in caught.value.why
