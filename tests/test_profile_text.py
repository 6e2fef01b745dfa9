from __future__ import annotations

from pathlib import Path

import pytest
from profile_cases import BERT, BERT_YAML, IMAGE, load

from trtforge.profile import DimFact, DimReport, ProfileSet, ShapeRange
from trtforge.profile_data import profiles_from_data
from trtforge.profile_text import dim_names, profile_template, profiles_to_yaml
from trtforge.tensor import TensorSpec


def test_template_shares_named_dims_and_names_the_others() -> None:
    specs = (
        TensorSpec("x", "float32", ("batch", 3, None, "?")),
        TensorSpec("0", "int64", ("batch size", "seq+1", "0", "no", "n")),
        TensorSpec("y:0", "float32", None),
        TensorSpec("z", "float32", ("seq+1", "seq-1")),
    )
    assert profile_template(specs) == (
        "dims:\n"
        "  batch: {min: 1, opt: ?, max: ?}\n"
        "  x_2: {min: 1, opt: ?, max: ?}\n"
        "  x_3: {min: 1, opt: ?, max: ?}\n"
        "  batch_size: {min: 1, opt: ?, max: ?}\n"
        "  seq_1: {min: 1, opt: ?, max: ?}\n"
        "  dim_0_2: {min: 1, opt: ?, max: ?}\n"
        "  dim_0_3: {min: 1, opt: ?, max: ?}\n"
        "  n: {min: 1, opt: ?, max: ?}\n"
        "  z_1: {min: 1, opt: ?, max: ?}\n"
        "inputs:\n"
        "  x: [batch, 3, x_2, x_3]\n"
        '  "0": [batch_size, seq_1, dim_0_2, dim_0_3, n]\n'
        '  "y:0": [?]  # one entry per axis; the model does not state how many\n'
        "  z: [seq_1, z_1]\n"
    )


def test_a_filled_in_template_is_a_valid_profile(tmp_path: Path) -> None:
    specs = (TensorSpec("on", "float32", ("off", None, "?")), TensorSpec("1", "int64", (None, "off")))
    text = profile_template(specs).replace("opt: ?", "opt: 2").replace("max: ?", "max: 4")
    profiles = load(tmp_path, text, specs)
    assert profiles.first.inputs["on"] == ShapeRange((1, 1, 1), (2, 2, 2), (4, 4, 4))


def test_dims_that_sanitise_to_one_name_stay_apart() -> None:
    specs = (TensorSpec("a b", "float32", ("s?", None)), TensorSpec("a_b", "float32", ("s!", None)))
    names = [name for dims in dim_names(specs).values() for name in dims]
    assert len(set(names)) == 4


def round_trip(tmp_path: Path, profiles: ProfileSet, specs: tuple[TensorSpec, ...]) -> ProfileSet:
    return load(tmp_path, profiles_to_yaml(profiles, specs), specs)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        (BERT_YAML, BERT),
        (BERT_YAML + "profiles: [{name: prefill, dims: {seq: {min: 16}}}, {name: decode, dims: {seq: 1}}]", BERT),
        (BERT_YAML + "profiles: [{name: 'on'}]", BERT),
        ("dims: {b: {min: 1, opt: 2, max: 4}}\ninputs: {x: [b, 3, 224, 224]}", IMAGE),
        ("inputs: {x: [1, 3, 224, 224]}", IMAGE),
        (
            "dims: {batch: 1, seq: {min: 1, opt: 2, max: 3}, s2: {min: 1, opt: 2, max: 9}}\n"
            "inputs: {input_ids: [batch, seq], attention_mask: [batch, s2]}",
            BERT,
        ),
        (
            "dims: {b: {min: 1, opt: 2, max: 3}, c: {min: 1, opt: 2, max: 3}}\n"
            "inputs: {x: [b, c]}\nprofiles: [{name: a}, {name: b, dims: {b: 2}}]",
            (TensorSpec("x", "float32", ("n", "n")),),
        ),
        (
            "inputs: {x: [1]}\nvalues: {x: {min: [1], opt: [2], max: [3]}}\n"
            "profiles: [{name: a}, {name: b, values: {x: {min: [1], opt: [1], max: [1]}}}]",
            (TensorSpec("x", "int32", ("n",)),),
        ),
        (
            'dims: {d: {min: 0, opt: 1, max: 2}}\ninputs: {"a\\n\\"b\\\\ \\U0001F600": [d], "null": [d, d], "": [d]}',
            (
                TensorSpec('a\n"b\\ \U0001f600', "float32", (None,)),
                TensorSpec("null", "float32", ("a: b", "0")),
                TensorSpec("", "float32", ("{",)),
            ),
        ),
        ("inputs: {x: [2, 5]}", (TensorSpec("x", "float32", None),)),
    ],
)
def test_profiles_written_as_yaml_read_back_the_same(tmp_path: Path, text: str, specs: tuple[TensorSpec, ...]) -> None:
    profiles = load(tmp_path, text, specs)
    assert round_trip(tmp_path, profiles, specs) == profiles


def test_profiles_from_data_read_back_the_same(tmp_path: Path) -> None:
    shapes = {"input_ids": [(8, 32), (3, 64)], "attention_mask": [(8, 32), (3, 16)]}
    profiles = profiles_from_data(shapes, BERT)
    assert round_trip(tmp_path, profiles, BERT).profiles == profiles.profiles


def test_yaml_shares_dims_of_one_name_and_range() -> None:
    profiles = profiles_from_data({"input_ids": [(8, 32), (3, 64)], "attention_mask": [(8, 32), (3, 64)]}, BERT)
    assert profiles_to_yaml(profiles, BERT) == (
        "dims:\n  batch: {min: 1, opt: 8, max: 8}\n  seq: {min: 32, opt: 64, max: 64}\n"
        "inputs:\n  input_ids: [batch, seq]\n  attention_mask: [batch, seq]\n"
    )


def test_a_template_fills_in_what_the_graph_says_and_gives_the_reasons() -> None:
    specs = (
        TensorSpec("x", "float32", ("n", None, "h", "w", "k")),
        TensorSpec("past", "float32", (None, "p")),
        TensorSpec("mask", "int64", (None, "t")),
        TensorSpec("sizes", "int64", (2,)),
    )
    report = DimReport(
        (
            DimFact("batch", (("x", 0), ("past", 0), ("mask", 0)), "free"),
            DimFact("channels", (("x", 1),), "fixed", 6, 6, suggestion=6, reason="node 'conv' (Conv): 6 channels"),
            DimFact("h", (("x", 2),), "free", 32, None, 32, reason="node 'skip' (Concat): they differ"),
            DimFact("w", (("x", 3),), "free", 224, 239, suggestion=224, reason="node 'add' (Add): no"),
            DimFact("k", (("x", 4),), "free", 1, 512, reason="node 'table' (Gather):\nentry 512"),
            DimFact("p", (("past", 1),), "free"),
            DimFact("t", (("mask", 1),), "derived", terms=(("p", 1), ("k", 2)), offset=1, reason="node 'm' (Add)"),
        ),
        {"sizes": "node 'r' (Reshape)"},
    )
    assert profile_template(specs, report) == (
        "dims:\n"
        "  batch: {min: 1, opt: ?, max: ?}\n"
        "  channels: 6  # fixed: node 'conv' (Conv): 6 channels\n"
        "  h: {min: 32, opt: ?, max: ?}  # a multiple of 32 from 32 on: node 'skip' (Concat): they differ\n"
        "  w: 224  # from 224 to 239: node 'add' (Add): no, for example\n"
        "  k: {min: 1, opt: ?, max: 512}  # from 1 to 512: node 'table' (Gather): entry 512\n"
        "  p: {min: 1, opt: ?, max: ?}\n"
        "  t: {min: ?, opt: ?, max: ?}  # = p + 2*k + 1: node 'm' (Add)\n"
        "inputs:\n"
        "  x: [batch, channels, h, w, k]\n"
        "  past: [batch, p]\n"
        "  mask: [batch, t]\n"
        "  sizes: [2]\n"
        "values:\n"
        "  sizes: {min: [?, ?], opt: [?, ?], max: [?, ?]}  # read by node 'r' (Reshape)\n"
    )


def test_a_hostile_reason_stays_on_its_line(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "float32", ("n", 3)),)
    fact = DimFact("n", (("x", 0),), "free", 2, 9, reason="node 'a\nvalues: {x: 1}\n' (Add)\r\u2028x: 1")
    text = profiles_to_yaml(profiles_from_data({"x": [(2, 3), (4, 3)]}, specs), specs, DimReport((fact,), {}))
    assert len(text.splitlines()) == 4
    assert load(tmp_path, text, specs).first.inputs["x"].max == (4, 3)
