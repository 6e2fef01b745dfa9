from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trtforge.hashing import canonical_json, fingerprint, sha256_of_file


def test_file_hash_is_sha256_of_all_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    assert sha256_of_file(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_fingerprint_does_not_depend_on_key_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})


def test_fingerprint_depends_on_every_value_and_on_list_order() -> None:
    values = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": [1, 2]}, {"a": [2, 1]}, {"a": "1"}, {"a": None}, {"a": [[1], 2]}]
    assert len({fingerprint(value) for value in values}) == len(values)


def test_canonical_json_is_ascii_without_spaces() -> None:
    assert canonical_json({"b": "é", "a": [1, 2.5]}) == '{"a":[1,2.5],"b":"\\u00e9"}'


def test_nan_has_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="JSON"):
        fingerprint(float("nan"))
