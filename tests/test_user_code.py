from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trtforge.errors import InputError
from trtforge.hashing import sha256_of_file
from trtforge.user_code import load_function, source_sha256


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:f", "cannot be imported\nwhy: ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:no_such_function", "cannot be imported\nwhy: AttributeError"),
        ("json:", "cannot be used\nwhy: it is not package.module:function"),
        (":f", "cannot be used\nwhy: it is not package.module:function"),
        ("json:a.b", "cannot be used\nwhy: it is not package.module:function"),
        (".json:loads", "cannot be imported\nwhy: TypeError"),
    ],
)
def test_names_that_lead_to_no_function_are_refused(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        load_function(name, "data")
    assert text in str(caught.value)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InputError, match="metric 'sys:maxsize' is no function\nwhy: it is a int"):
        load_function("sys:maxsize", "metric")


@pytest.mark.parametrize("body", ["raise ValueError('x')", "import sys; sys.exit(3)", "import os; os.chdir('/'); 1/0"])
def test_a_module_that_fails_is_refused_and_leaves_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_module.py").write_text(body)
    before = list(sys.path)
    with pytest.raises(InputError, match="cannot be imported"):
        load_function("failing_module:f", "data")
    assert sys.path == before


def test_the_hash_of_a_module_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "hashed_package" / "metrics.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("")
    hashes = []
    for body in ("raise ValueError('it is not run')", "raise ValueError('it is edited')"):
        file.write_text(body)
        hashes.append(source_sha256("hashed_package.metrics:f"))
        assert hashes[-1] == sha256_of_file(file)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("name", ["no_such_module:f", "no_such_package.module:f", "json.no_such_module:f", ":f"])
def test_a_module_without_a_file_has_no_hash(name: str) -> None:
    assert source_sha256(name) is None
