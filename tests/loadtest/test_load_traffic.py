"""Traffic files, and addresses as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtforge.errors import InputError
from trtforge.loadtest.address import parse_address
from trtforge.loadtest.results import Load
from trtforge.loadtest.steps import loads_of, planned_steps
from trtforge.loadtest.traffic import Traffic, load_traffic


def read(tmp_path: Path, text: str, **changes: object) -> Traffic:
    path = tmp_path / "traffic.yaml"
    path.write_text(text)
    return load_traffic(path, changes)


def test_steps_are_loads_times_batch_sizes(tmp_path: Path) -> None:
    text = "model: m\nbatch: [1, 4]\nload: {users: [1, {start: 1, end: 8}], rates: [50]}"
    assert planned_steps(read(tmp_path, text)) == [
        "1 user, batch 1",
        "1 to 8 users, batch 1",
        "50 requests/s, batch 1",
        "1 user, batch 4",
        "1 to 8 users, batch 4",
        "50 requests/s, batch 4",
    ]


def test_a_mix_of_batch_sizes_is_one_step(tmp_path: Path) -> None:
    traffic = read(tmp_path, "model: m\nbatch: {1: 9, 4: 1}")
    assert traffic.batch_weights == {1: 9.0, 4: 1.0}
    assert planned_steps(traffic) == ["1 user"]


def test_options_take_the_place_of_the_file(tmp_path: Path) -> None:
    traffic = read(tmp_path, "model: m\nload: {users: [9]}\nduration_s: 60", load={"rates": [5.0]}, duration_s=2.0)
    assert list(loads_of(traffic)) == [Load(kind="open", start=5, end=5)]
    assert traffic.duration_s == 2


def test_fingerprint_is_of_the_requests_and_not_of_their_load(tmp_path: Path) -> None:
    base = read(tmp_path, "model: m\nlengths: [{min: 1, max: 8}]")
    other_load = read(tmp_path, "model: n\nlengths: [{min: 1, max: 8}]\nload: {users: [7]}\nduration_s: 9")
    other_lengths = read(tmp_path, "model: m\nlengths: [{min: 1, max: 9}]")
    assert base.request_fingerprint({}) == other_load.request_fingerprint({})
    assert base.request_fingerprint({}) != other_lengths.request_fingerprint({})
    assert base.request_fingerprint({"a": "1"}) != base.request_fingerprint({"a": "2"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model: m\nusers: 3", "unknown key 'users'"),
        ("load: {users: [1]}", "missing key 'model'"),
        ("- model", "found list"),
        ("model: m\nload: {}", "1 to 64 loads"),
        ("model: m\nload: {users: [0]}", "greater than 0"),
        ("model: m\nload: {users: [{start: 0.5, end: 2}]}", "starts and ends at a whole number"),
        ("model: m\nload: {rates: [-1]}", "greater than 0"),
        ("model: m\nlengths: [{min: 9, max: 8}]", "min 9 is above max 8"),
        ("model: m\nlengths: [{min: 8, max: 8}, {min: 8, max: 8}]", "two length buckets or sample files have one name"),
        ("model: m\nbatch: 0", "greater than 0"),
        ("model: m\nbatch: []", "batch holds no size"),
        ("model: m\nsamples: [{file: a.npz}]\nlengths: [{min: 1, max: 2}]", "real samples have their own"),
        ("model: m\ninputs: {x: {min: 2, max: 1}}", "min 2 is above max 1"),
        ("model: m\ninputs: {x: {file: a.txt, min: 1}}", "a text file has no min and max"),
        ("model: m\nexpect: {model: a.onnx, file: b.npz}", "cannot be given together"),
        ("model: m\nthink_s: {min: 2, max: 1}", "min 2 is above max 1"),
        ("model: m\nduration_s: .inf", "finite number"),
        (f"model: m\nbatch: {list(range(1, 66))}", "batch lists 65 sizes"),
        (
            f"model: m\nbatch: {{1: 1, 2: 1}}\nlengths: {[{'min': n, 'max': n} for n in range(1, 130)]}",
            "258 pairs of length bucket and batch size",
        ),
        ("model: m\nthink_s: 1.0e+300", "less than or equal to 86400"),
        ("model: m\nload: {rates: [1.0e+9]}", "less than or equal to 20000"),
        ("model: m\nbatch: [1, 4, 1]", "a batch size stands there twice"),
        ("model: m\nload: {users: [4, 4]}", "a load stands there twice"),
        ("model: m\nload: {rates: [5, {start: 5, end: 5}]}", "a load stands there twice"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("text", "protocol", "url", "spoken", "metrics"),
    [
        ("127.0.0.1:8000", None, "127.0.0.1:8000", "http", "http://127.0.0.1:8002/metrics"),
        ("host", None, "host:8000", "http", "http://host:8002/metrics"),
        ("http://host:9000/base/", None, "host:9000/base", "http", None),
        ("grpc://host:8001", None, "host:8001", "grpc", "http://host:8002/metrics"),
        ("[::1]:9001", "grpc", "[::1]:9001", "grpc", None),
    ],
)
def test_address_as_typed(text: str, protocol: str | None, url: str, spoken: str, metrics: str | None) -> None:
    address = parse_address(text, protocol, None)  # type: ignore[arg-type]
    assert (address.url, address.protocol, address.metrics) == (url, spoken, metrics)


def test_metrics_may_be_named_by_host_and_port() -> None:
    assert parse_address("h:1", None, "h:9").metrics == "http://h:9/metrics"
    assert parse_address("h:1", None, "https://h/m").metrics == "https://h/m"


@pytest.mark.parametrize(("text", "is_local"), [("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False)])
def test_loopback_is_local(text: str, is_local: bool) -> None:
    assert parse_address(text, None, None).is_local is is_local


@pytest.mark.parametrize(
    ("text", "protocol", "words"),
    [
        ("https://host", None, "use a port forward"),
        ("http://host:1", "grpc", "contradicts --protocol grpc"),
        ("host:port", None, "is no address"),
        ("host:70000", None, "is no address"),
        (":8000", None, "is no address"),
        ("grpc://host:1/path", None, "is no address"),
        ("host:1?a=b", None, "is no address"),
        ("host:0", None, "a port is a number from 1 to 65535"),
        ("[::1:8000", None, "is no address"),
        ("::1", None, "an IPv6 one in [ ]"),
        ("http://http://host", None, "is no address"),
        ("ho st:1", None, "is no address"),
    ],
)
def test_bad_address_is_refused(text: str, protocol: str | None, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_address(text, protocol, None)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "example", sorted(Path(__file__).parents[2].glob("examples/*/traffic.yaml")), ids=lambda path: path.parent.name
)
def test_traffic_of_the_examples_can_be_read(example: Path) -> None:
    traffic = load_traffic(example)
    assert len(planned_steps(traffic)) >= 3
    assert all((example.parent / name).is_file() for name in traffic.files())


def test_examples_have_traffic() -> None:
    assert len(list(Path(__file__).parents[2].glob("examples/*/traffic.yaml"))) == 2
