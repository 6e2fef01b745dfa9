"""Check a `.pt2` file before torch loads it; no torch here.

`torch.export.load` unpickles without restriction: weights that are marked so, custom objects, and sample inputs that
its restricted unpickler refuses. It also evaluates the text of symbolic sizes, looks operators up by dotted name, and
makes Python code of names. So only entries that hold raw tensors are let in, every name, size and operator of the
program has to be of the plainest form, and sample inputs are never read.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtforge.errors import InputError
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import parse_json

_CONVERT = (
    "load it where you trust the file and save it with a newer torch: torch.export.save(torch.export.load(old), new)"
)
# Entries, without the archive's own first folder.
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id|data)|\.format_version|\.storage_alignment"
    r"|models/model\.json|data/(weights|constants)/model_(weights|constants)_config\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+|data/sample_inputs/model\.pt|extra/.*"
)
_NATIVE_CODE = "data/aotinductor/"
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
# Operators that compute: no reading of files, no calls of what a graph hands them.
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed)\.(?!from_file)(?!__)\w+(\.\w+)?"
    r"|torch\.ops\.aten\.__i?(and|or|xor|lshift|rshift)__\.\w+"
    r"|torch\.ops\.higher_order\.(cond|while_loop|scan|map_impl|associative_scan|wrap_with_set_grad_enabled)"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|xor|not_)"
    r"|math\.[a-z]\w*|torch\.sym_\w+|torch\._sym_sqrt",
    re.ASCII,
)
# What a symbolic size is made of: numbers, symbols, operators, and these functions of sympy and torch.
_SIZE_TOKENS = re.compile(r"[A-Za-z_]\w*|\d+(\.\d+)?(e[+-]?\d+)?|[-+*/%(),<>=&|~! ]", re.ASCII)
_SPELLED_SYMBOL = re.compile(r"Symbol\('([suf]\d+|zuf?\d+)'(, [a-z_]+=(True|False))*\)", re.ASCII)
_SPELLED_FLOAT = re.compile(r"Float\('[-+.e\d]+', precision=\d+\)", re.ASCII)
_SYMBOL = re.compile(r"[suf]\d+|zuf?\d+|oo|int_oo|true|false|True|False", re.ASCII)
_SIZE_FUNCTION = re.compile(
    r"FloorDiv|ModularIndexing|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural"
    r"|FloatPow|FloatTrueDiv|IntTrueDiv|IsNonOverlappingAndDenseIndicator|Trunc(ToFloat|ToInt)|Round(ToInt|Decimal)"
    r"|ToFloat|Identity|Max|Min|Abs|And|Or|Not|Eq|Ne|Ge|Gt|Le|Lt|(Une|E)quality|(Strict)?(Greater|Less)Than"
    r"|ceiling|floor|Add|Mul|Pow|Integer|Rational"
)
# Keys whose text becomes a name in the Python code that torch makes of a graph.
_NAMES = {"name", "as_name", "graph_name", "buffer_name", "parameter_name", "tensor_constant_name", "fqn", "class_fqn"}
_TREE_TYPES = {None, "builtins.list", "builtins.tuple", "builtins.dict", "collections.OrderedDict"}


def check_program(path: Path, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check that loading a `.pt2` file runs no code of it.

    Raises:
        InputError: no such file, damaged, in an older format, or with anything beyond tensors and a plain graph.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_archive(archive, path, limits)
    except FileNotFoundError as err:
        raise InputError(f"model {path} does not exist", "no such file", "check the path") from err
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise InputError(f"{path} is no .pt2 file", reason, "save it again with torch.export.save") from err


def _check_is_read_alike(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive of which torch's reader may see other entries than this one, which are then not checked.

    Of two entries with one name, in whatever case, torch takes the first, and its folder is the first entry's.

    Raises:
        InputError: it is one.
    """
    entries = archive.infolist()
    names = [info.filename.lower() for info in entries]
    if len(set(names)) < len(names):
        reason = f"it holds {next(name for name in names if names.count(name) > 1)[:80]!r} more than once"
    elif len({info.filename.partition("/")[0] for info in entries}) > 1:
        reason = "it has more than one top folder"
    elif min((info.header_offset for info in entries), default=0) or not _ends_plainly(path):
        reason = "something lies before the archive or about its end"
    else:
        return
    raise InputError(
        f"{path} is no plain .pt2 file",
        f"{reason}, so torch may read another entry than is checked here",
        "save it again with torch.export.save",
    )


def _ends_plainly(path: Path) -> bool:
    """Whether a zip file ends with its directory's end record, and a locator before that points to what precedes it."""
    with path.open("rb") as file:
        start = file.seek(-98, 2)
        tail = file.read()
    # 56 bytes of the 64-bit end record, 20 of its locator, 22 of the end record without a comment (APPNOTE 4.3.14 on).
    signature, _, place, _ = struct.unpack("<4sLQL", tail[56:76])
    is_end = tail[76:80] == b"PK\x05\x06" and tail[96:] == b"\x00\x00"
    return is_end and (signature != b"PK\x06\x07" or (tail[:4] == b"PK\x06\x06" and place == start))


def _check_archive(archive: zipfile.ZipFile, path: Path, limits: Limits) -> None:
    files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    if any(name.startswith("serialized_") for name in files):
        raise InputError(f"{path} is in torch's older .pt2 format", "its weights would have to be unpickled", _CONVERT)
    names = {name: name.partition("/")[2] for name in files}
    if "models/model.json" not in names.values():
        raise InputError(
            f"{path} holds no torch.export program",
            "it has no models/model.json" + (" but compiled code" if _has_native_code(names) else ""),
            "save the exported program with torch.export.save",
        )
    _check_is_read_alike(archive, path)
    for name, inner in names.items():
        if files[name].compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{path} holds compressed entries", f"{name[:80]!r} is one", _CONVERT)
        if not _PLAIN.fullmatch(inner):
            raise InputError(
                f"{path} holds {inner[:80]!r}, which would have to be unpickled or run",
                "unpickling a file runs whatever code it holds, so trtforge loads plain tensors and graphs only",
                _CONVERT,
            )
    for name, inner in names.items():
        if inner.endswith("_config.json"):
            _check_payloads(_read_json(archive, name, limits), inner, path)
    program = next(name for name, inner in names.items() if inner == "models/model.json")
    for problem in _problems(_read_json(archive, program, limits)):
        raise InputError(
            f"{path} holds a program that is not loaded", problem, "save the model with torch.export.save again"
        )


def _has_native_code(names: dict[str, str]) -> bool:
    return any(inner.startswith(_NATIVE_CODE) for inner in names.values())


def _read_json(archive: zipfile.ZipFile, name: str, limits: Limits) -> Any:
    if archive.getinfo(name).file_size > limits.text_bytes:
        raise InputError(
            f"{name!r} of the .pt2 file is too large",
            f"it has more than {limits.text_bytes} bytes, which is the limit",
            f"raise it with --limit text_bytes={archive.getinfo(name).file_size}",
        )
    try:
        return parse_json(archive.read(name).decode("utf-8"), f"{name} of the .pt2 file")
    except UnicodeDecodeError as err:
        raise InputError(f"{name!r} of the .pt2 file is not UTF-8 text", str(err), "save it again") from err


def _check_payloads(config: Any, name: str, path: Path) -> None:
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise InputError(f"{path} is damaged", f"{name} has no 'config'", "save it again with torch.export.save")
    for key, entry in entries.items():
        plain = isinstance(entry, dict) and entry.get("use_pickle") is False
        if not plain or not re.fullmatch(r"(weight|tensor)_\d+", str(entry.get("path_name")), re.ASCII):
            raise InputError(
                f"{path} stores {key!r} as a pickle",
                "unpickling a file runs whatever code it holds, so trtforge never does",
                "turn tensor subclasses into plain tensors before torch.export, and save it again",
            )


def _problems(program: Any) -> Iterator[str]:
    """What in a program is more than a plain graph."""
    stack = [("", program)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack += [(str(name), item) for name, item in value.items() if name != "metadata"]
            for text in value if key == "range_constraints" else ():
                if not is_plain_size(text):
                    yield f"the symbolic size {text[:80]!r}"
        elif isinstance(value, list):
            stack += [(key, item) for item in value]
        elif isinstance(value, str) and (problem := _problem(key, value)):
            yield problem


def _problem(key: str, text: str) -> str:
    if key == "expr_str" and not is_plain_size(text):
        return f"the symbolic size {text[:80]!r}"
    if key in {"target", "as_operator"} and not is_plain_target(text):
        return f"the operator {text[:80]!r}"
    if key in _NAMES and text and not _NAME.fullmatch(text):
        return f"the name {text[:80]!r}"
    if key in {"in_spec", "out_spec"} and text and not _is_plain_tree(text):
        return f"inputs or outputs of the types {text[:80]!r}"
    return ""


def is_plain_target(text: str) -> bool:
    """Whether a node's target is an operator that only computes, or the name of a tensor or parameter."""
    if text.startswith(("torch", "_operator", "math", "#")):
        return _OPERATOR.fullmatch(text) is not None
    return _NAME.fullmatch(text) is not None


def is_plain_size(text: str) -> bool:
    """Whether a symbolic size is arithmetic over symbols, and nothing that Python could call besides."""
    text = _SPELLED_FLOAT.sub("1", _SPELLED_SYMBOL.sub(r"\1", text))
    position = 0
    while position < len(text):
        found = _SIZE_TOKENS.match(text, position)
        if found is None:
            return False
        word, position = found.group(), found.end()
        is_call = text[position : position + 1] == "("
        is_word = word[0].isalpha() or word[0] == "_"
        if is_word and not (_SIZE_FUNCTION if is_call else _SYMBOL).fullmatch(word):
            return False
    return True


def _is_plain_tree(text: str) -> bool:
    """Whether a pytree description, which is JSON inside JSON, speaks of Python's own containers only."""
    stack = [parse_json(text, "a tree of the .pt2 file")]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value.get("type") not in _TREE_TYPES:
                return False
            stack += value.get("children_spec") or []
    return True
