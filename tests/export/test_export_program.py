from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support import zip_of

from trtforge.errors import InputError
from trtforge.export.program import check_program, is_plain_size, is_plain_target
from trtforge.limits import Limits

TREE = '[1, {"type": "builtins.tuple", "context": "null", "children_spec": []}]'


def model_json(**changes: Any) -> dict[str, Any]:
    """A program in the format of torch.export.save, with one node."""
    node = {
        "target": "torch.ops.aten.relu.default",
        "inputs": [{"name": "self", "arg": {"as_tensor": {"name": "x"}}, "kind": 1}],
        "outputs": [{"as_tensor": {"name": "relu"}}],
        "metadata": {"stack_trace": 'File "m.py", line 1, in forward\n  return x.relu()'},
        "name": "relu",
    }
    size = {"as_expr": {"expr_str": "Symbol('s31', positive=True, integer=True)", "hint": {"as_int": 2}}}
    graph = {
        "inputs": [{"as_tensor": {"name": "x"}}],
        "nodes": [node | changes.pop("node", {})],
        "tensor_values": {"x": {"dtype": 7, "sizes": [changes.pop("size", size), {"as_int": 4}]}},
    }
    call = {"fqn": "", "signature": {"in_spec": TREE, "out_spec": TREE}}
    program = {"graph_module": {"graph": graph, "module_call_graph": [call]}, "range_constraints": {"s31": {}}}
    return program | changes


def save(path: Path, program: Any = None, **entries: bytes) -> Path:
    """A `.pt2` file with this program and further entries."""
    config = json.dumps({"config": {"w": {"path_name": "weight_0", "use_pickle": False}}})
    members = {
        "m/archive_format": b"pt2",
        "m/archive_version": b"0",
        "m/byteorder": b"little",
        "m/models/model.json": json.dumps(model_json() if program is None else program).encode(),
        "m/data/weights/model_weights_config.json": config.encode(),
        "m/data/constants/model_constants_config.json": b'{"config": {}}',
        "m/data/weights/weight_0": bytes(16),
        "m/data/sample_inputs/model.pt": b"PK\x03\x04",
        "m/.data/version": b"6",
        **{f"m/{name}": content for name, content in entries.items()},
    }
    return zip_of(path, members)


def refusal(path: Path, limits: Limits | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        check_program(path, *(() if limits is None else (limits,)))
    return caught.value


def test_tensors_and_a_plain_graph_are_let_in(tmp_path: Path) -> None:
    check_program(save(tmp_path / "m.pt2"))


@pytest.mark.parametrize(
    "name",
    [
        "data/weights/model.pt",
        "data/constants/model.pt",
        "data/constants/custom_obj_0",
        "data/constants/opaque_obj_0",
        "data/aotinductor/model/wrapper.so",
        "models/other.json",
        "../../etc/passwd",
    ],
)
def test_entries_that_would_be_unpickled_or_run_are_refused(tmp_path: Path, name: str) -> None:
    error = refusal(save(tmp_path / "m.pt2", **{name: b"x"}))
    assert f"{name!r}, which would have to be unpickled or run" in error.what
    assert "torch.export.save" in error.fix


@pytest.mark.parametrize(
    "entry", [{"use_pickle": True}, {}, {"path_name": "../weight_0"}, {"path_name": "custom_obj_0"}]
)
def test_weights_stored_as_pickles_are_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    entry = {"path_name": "weight_0"} | ({"use_pickle": False} if "path_name" in entry else {}) | entry
    config = {"config": {"a.weight": entry}}
    path = save(tmp_path / "m.pt2", **{"data/weights/model_weights_config.json": json.dumps(config).encode()})
    assert "stores 'a.weight' as a pickle" in refusal(path).what


def test_the_older_format_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "m.pt2", {"serialized_exported_program.json": b"{}", "serialized_state_dict.pt": b"x"})
    error = refusal(path)
    assert "older .pt2 format" in error.what
    assert error.fix.endswith("torch.export.save(torch.export.load(old), new)")


def test_files_that_are_no_programs(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.pt2").what
    (tmp_path / "text.pt2").write_text("hello")
    assert "is no .pt2 file" in refusal(tmp_path / "text.pt2").what
    whole = save(tmp_path / "m.pt2").read_bytes()
    (tmp_path / "cut.pt2").write_bytes(whole[: len(whole) // 2])
    assert "is no .pt2 file" in refusal(tmp_path / "cut.pt2").what
    compiled = zip_of(tmp_path / "aoti.pt2", {"m/data/aotinductor/model/x.so": b"\x7fELF"})
    assert "compiled code" in refusal(compiled).why
    packed = tmp_path / "packed.pt2"
    zip_of(packed, {"m/models/model.json": json.dumps(model_json()).encode()}, zipfile.ZIP_DEFLATED)
    assert "holds compressed entries" in refusal(packed).what
    assert "is too large" in refusal(save(tmp_path / "big.pt2"), Limits(text_bytes=20)).what


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"node": {"target": "torch.load"}}, "the operator 'torch.load'"),
        ({"node": {"target": "torch.ops.aten.from_file.default"}}, "the operator"),
        ({"node": {"target": "_operator.methodcaller"}}, "the operator"),
        ({"node": {"name": "x=__import__('os')"}}, "the name"),
        ({"node": {"inputs": [{"name": "f", "arg": {"as_operator": "torch.hub.load"}}]}}, "the operator"),
        ({"size": {"as_expr": {"expr_str": "__import__('os').system('true')"}}}, "the symbolic size"),
        ({"range_constraints": {"exec(chr(95))": {}}}, "the symbolic size"),
        ({"module_call_graph": [{"signature": {"in_spec": TREE.replace("builtins.tuple", "os.system")}}]}, "the types"),
    ],
)
def test_programs_that_torch_would_evaluate_are_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    error = refusal(save(tmp_path / "m.pt2", model_json(**changes)))
    assert "holds a program that is not loaded" in error.what
    assert found in error.why


HARMFUL = json.dumps(model_json(size={"as_expr": {"expr_str": "__import__('os').system('true')"}})).encode()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("m/models/model.json", "holds 'm/models/model.json' more than once"),
        ("m/MODELS/model.json", "holds 'm/models/model.json' more than once"),
        ("other/models/model.json", "more than one top folder"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_program_beside_the_one_that_is_checked_is_refused(
    tmp_path: Path, name: str, why: str, is_first: bool
) -> None:
    plain = save(tmp_path / "plain.pt2")
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tmp_path / "m.pt2", "w") as archive:
        if is_first:
            archive.writestr(name, HARMFUL)
        for entry in source.namelist():
            archive.writestr(entry, source.read(entry))
        if not is_first:
            archive.writestr(name, HARMFUL)
    error = refusal(tmp_path / "m.pt2")
    assert error.what.endswith("m.pt2 is no plain .pt2 file")
    assert why in error.why
    assert "torch may read another entry than is checked here" in error.why


def test_a_directory_that_only_another_reader_finds_is_refused(tmp_path: Path) -> None:
    """Python takes the directory right before the end record; others go to the place that a record or locator names."""
    harmful, plain = save(tmp_path / "h.pt2", json.loads(HARMFUL)).read_bytes(), save(tmp_path / "p.pt2").read_bytes()
    why = "something lies before the archive or about its end"
    (tmp_path / "m.pt2").write_bytes(harmful + plain)
    assert why in refusal(tmp_path / "m.pt2").why
    (tmp_path / "m.pt2").write_bytes(plain + bytes(4))
    assert why in refusal(tmp_path / "m.pt2").why
    # The locator is the comment of the last entry, so that nothing seems to lie between the directory and its end.
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    with zipfile.ZipFile(tmp_path / "p.pt2", "a") as archive:
        archive.infolist()[-1].comment = locator
        archive.writestr("m/extra/last", b"")
        archive.infolist()[-1].comment = locator
    assert (tmp_path / "p.pt2").read_bytes()[-42:-22] == locator
    assert why in refusal(tmp_path / "p.pt2").why


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("s31", True),
        ("Symbol('s31', positive=True, integer=True)", True),
        ("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(-1))", True),
        ("FloorDiv(s0 - 1, 2) + 1", True),
        ("Eq(s0, 4) & (s1 >= 2)", True),
        ("Float('1.5', precision=53)*u0", True),
        ("-int_oo", True),
        ("open(s0)", False),
        ("chr(95)", False),
        ("s0.__class__", False),
        ("'s0'", False),
        ("[s0]", False),
        ("lambda: s0", False),
        ("Symbol('x'+'y')", False),
        ("Symbol(s0)", False),
        ("E", False),
        ("s0;s1", False),
    ],
)
def test_symbolic_sizes_are_arithmetic(text: str, plain: bool) -> None:
    assert is_plain_size(text) is plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("torch.ops.aten.add.Tensor", True),
        ("torch.ops.aten.__and__.Tensor", True),
        ("torch.ops.quantized_decomposed.quantize_per_tensor.default", True),
        ("torch.ops.higher_order.cond", True),
        ("_operator.getitem", True),
        ("math.ceil", True),
        ("torch.sym_max", True),
        ("p_layer_weight", True),
        ("torch.ops.aten.__class__.mro", False),
        ("torch.ops.load_library", False),
        ("torch.ops.inductor.run.default", False),
        ("torch.os.system", False),
        ("torchx.y", False),
        ("_operator.call", False),
        ("_operator.attrgetter", False),
        ("math.__loader__.x", False),
        ("#ext:op", False),
        ("a b", False),
    ],
)
def test_targets_are_operators_that_compute(text: str, plain: bool) -> None:
    assert is_plain_target(text) is plain
