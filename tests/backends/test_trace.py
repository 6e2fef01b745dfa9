from __future__ import annotations

from trtforge.backends.trace import BuildTrace, read_log

PARSED = (
    "Static check for parsing node: n0 [Relu]",
    "Parsing node: n0 [Relu]",
    "n0 [Relu] inputs: [x -> (-1, 8)[FLOAT]], ",
    "n0 [Relu] outputs: [t0 -> (-1, 8)[FLOAT]], ",
    "Parsing node: n1 [Add]",
    "n1 [Add] inputs: [t0 -> (-1, 8)[FLOAT]], [t1 -> ()[HALF]], [optional input, not set], ",
)


def trace_of(*messages):
    trace = BuildTrace()
    for message in messages:
        trace.feed(message)
    return trace


def test_the_last_node_of_the_parser_is_kept_with_what_it_reads():
    trace = trace_of(*PARSED)
    assert (trace.node, trace.op, trace.parsed) == ("n1", "Add", False)
    assert trace.shapes_of("n1") == ("t0 float32[-1, 8]", "t1 float16[]")
    assert trace.shapes_of("n0") == ("x float32[-1, 8]",)
    assert trace.op_of("n0") == "Relu"
    assert (trace.maker_of("t0"), trace.reader_of("t0"), trace.maker_of("x")) == ("n0", "n1", None)
    assert trace.shapes_of("n7") == ()


def test_nodes_that_are_checked_after_a_refusal_do_not_count():
    trace = trace_of(
        *PARSED, "ModelImporter.cpp:140: While parsing node number 1 [Add -> ...", "Parsing node: n2 [Mul]"
    )
    assert trace.node == "n1"
    assert trace.op_of("n2") == "Mul"


def test_after_parsing_the_last_node_that_is_mentioned_is_kept():
    trace = trace_of(*PARSED, "Marking y_0 as output: y", "Computing costs for {ForeignNode[n0...n1]}", "t0 and done")
    assert trace.parsed
    assert trace.mentioned == "n1"
    assert trace.node == "n1"


def test_a_log_gives_the_trace_and_the_names_of_its_last_build(tmp_path):
    log = tmp_path / "build.log"
    log.write_text(
        '[N] node names in this log:\n    n0 = "old"\n[V] Parsing node: n0 [Conv]\n'
        '[N] node names in this log:\n    n0 = "act \\u001b"\n    n1 = "sum"\n    broken line\n'
        '[N] tensor names in this log:\n    t0 = "hidden"\n'
        + "".join(f"[V] {message}\n" for message in PARSED)
        + "Unsupported ONNX data type: INT16 (5)\n"
    )
    trace, names = read_log(log)
    assert names.nodes == {"n0": "act \x1b", "n1": "sum"}
    assert names.tensors == {"t0": "hidden"}
    assert (trace.node, trace.op_of("n0")) == ("n1", "Relu")


def test_of_many_inputs_the_first_are_told():
    reads = ", ".join(f"[t{index} -> (1)[FLOAT]]" for index in range(40))
    trace = trace_of("Parsing node: n0 [Concat]", f"n0 [Concat] inputs: {reads}, ")
    assert trace.shapes_of("n0") == tuple(f"t{index} float32[1]" for index in range(16))
    assert trace.reader_of("t39") == "n0"


def test_a_log_that_is_not_there_gives_nothing(tmp_path):
    trace, names = read_log(tmp_path / "missing.log")
    assert trace.node is None
    assert names.nodes == {}
