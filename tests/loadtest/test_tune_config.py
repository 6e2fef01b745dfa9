"""`config.pbtxt` with other batching settings, read back by Triton's own protobuf message."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtforge.errors import InputError
from trtforge.loadtest.tuning.candidate import (
    DEFAULT,
    Candidate,
    batch_limit,
    diff,
    packaged_sizes,
    parse_preferred,
    with_candidate,
    without_batching,
)

CONFIG = """
name: "m" backend: "python" max_batch_size: 16
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
instance_group { kind: KIND_CPU count: 1 }
instance_group { kind: KIND_GPU count: 1 gpus: [0, 1] profile: ["1"] }
dynamic_batching {
  preferred_batch_size: [8]
  max_queue_delay_microseconds: 100
  default_queue_policy { timeout_action: REJECT max_queue_size: 64 }
}
parameters { key: "threads" value { string_value: "1" } }
"""


def read(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_settings_are_written_and_the_rest_is_kept() -> None:
    found = read(with_candidate(CONFIG, Candidate(delay_us=500, preferred=(4, 16), instances=3), "m"))
    assert list(found.dynamic_batching.preferred_batch_size) == [4, 16]
    assert found.dynamic_batching.max_queue_delay_microseconds == 500
    assert found.dynamic_batching.default_queue_policy.max_queue_size == 64
    assert [group.count for group in found.instance_group] == [3, 3]
    assert list(found.instance_group[1].gpus) == [0, 1]
    assert found.parameters["threads"].string_value == "1"


def test_default_has_no_dynamic_batching_and_one_instance() -> None:
    found = read(with_candidate(CONFIG, DEFAULT, "m"))
    assert not found.HasField("dynamic_batching")
    assert found.max_batch_size == 16
    assert [group.count for group in found.instance_group] == [1, 1]


def test_front_without_batching_keeps_its_instances() -> None:
    found = read(without_batching(CONFIG.replace("count: 1", "count: 2"), "m"))
    assert not found.HasField("dynamic_batching")
    assert [group.count for group in found.instance_group] == [2, 2]


def test_batching_without_delay_or_sizes_is_still_batching() -> None:
    bare = 'name: "m" max_batch_size: 16'
    found = read(with_candidate(bare, Candidate(delay_us=0), "m"))
    assert found.HasField("dynamic_batching")
    assert [group.count for group in found.instance_group] == [1]


def test_packaged_sizes_stay_and_sizes_above_the_limit_are_left_out() -> None:
    assert packaged_sizes(CONFIG, "m") == (8,)
    assert batch_limit(CONFIG, "m") == 16
    kept = read(with_candidate(CONFIG, Candidate(delay_us=0, preferred="packaged"), "m"))
    assert list(kept.dynamic_batching.preferred_batch_size) == [8]
    cut = read(with_candidate(CONFIG, Candidate(delay_us=0, preferred=(8, 32)), "m"))
    assert list(cut.dynamic_batching.preferred_batch_size) == [8]


def test_diff_shows_the_settings_alone() -> None:
    changed = {"m": with_candidate(CONFIG, Candidate(delay_us=500, preferred="packaged"), "m")}
    lines = diff({"m": CONFIG}, changed, "repo").splitlines()
    assert lines[0] == "--- m/config.pbtxt"
    changes = [line for line in lines[2:] if line[0] in "+-"]
    assert changes == ["-  max_queue_delay_microseconds: 100", "+  max_queue_delay_microseconds: 500"]
    same = {"m": with_candidate(CONFIG, Candidate(delay_us=100, preferred="packaged"), "m")}
    assert diff({"m": CONFIG}, same, "repo") == ""


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(InputError, match="m is no model configuration"):
        with_candidate("max_batch: 3", DEFAULT, "m")


def test_choices_of_preferred_sizes() -> None:
    assert parse_preferred("none, packaged,8,16+4") == ((), "packaged", (8,), (4, 16))
    for text in ("", "8+", "0", "-1", "eight", "8,,4"):
        with pytest.raises(InputError, match="--preferred") as caught:
            parse_preferred(text)
        assert "none nor packaged" in caught.value.why
