from __future__ import annotations

import pytest

from trtforge.errors import InputError, UnavailableError
from trtforge.target import (
    RTX_COMPUTE_CAPABILITIES,
    BackendName,
    Target,
    check_quantization,
    rtx_target_from_option,
    tensorrt_target_from_option,
)


def test_no_option_means_the_portable_default() -> None:
    target = rtx_target_from_option(None)
    assert target == Target(BackendName.TENSORRT_RTX, (80, 86, 89, 120), explicit=False)


def test_list_is_sorted_without_duplicates() -> None:
    target = rtx_target_from_option(" sm_120,sm_86 ,sm_89,sm_86")
    assert target.compute_capabilities == (86, 89, 120)
    assert target.names == ["sm_86", "sm_89", "sm_120"]
    assert target.explicit


@pytest.mark.parametrize("cc", RTX_COMPUTE_CAPABILITIES)
def test_every_rtx_compute_capability_stands_alone(cc: int) -> None:
    assert rtx_target_from_option(f"sm_{cc}").compute_capabilities == (cc,)


@pytest.mark.parametrize("name", ["", "86", "sm86", "sm_8", "sm_90a", "SM_86", "sm_-86", "sm_086", "sm_8600", "rtx"])
def test_what_is_no_compute_capability_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is not a compute capability") as caught:
        rtx_target_from_option(name)
    assert repr(name) in caught.value.what
    assert "sm_75, sm_80, sm_86, sm_89, sm_120, sm_121" in caught.value.why


def test_a_trailing_comma_is_refused() -> None:
    with pytest.raises(InputError, match="'' is not a compute capability"):
        rtx_target_from_option("sm_86,")


@pytest.mark.parametrize("name", ["sm_99", "sm_70", "sm_87", "sm_110"])
def test_an_unknown_gpu_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(InputError, match=f"--gpu {name} is unknown") as caught:
        rtx_target_from_option(f"sm_86,{name}")
    assert "sm_89" in caught.value.why
    assert "--gpu sm_86,sm_89" in caught.value.fix


@pytest.mark.parametrize(("name", "cards"), [("sm_90", "H100"), ("sm_100", "B200"), ("sm_103", "B300")])
def test_data_centre_gpus_without_rtx_are_sent_to_tensorrt(name: str, cards: str) -> None:
    with pytest.raises(UnavailableError, match=f"cannot build for {name} ") as caught:
        rtx_target_from_option(f"sm_86,{name}")
    assert cards in caught.value.what
    assert caught.value.fix == "build with --backend tensorrt on a machine with this GPU"


@pytest.mark.parametrize("gpu", ["sm_75,sm_86", "sm_120,sm_75"])
def test_turing_with_others_is_refused(gpu: str) -> None:
    with pytest.raises(InputError, match="sm_75 cannot share an engine") as caught:
        rtx_target_from_option(gpu)
    assert "Turing's code" in caught.value.why
    assert "one artifact for --gpu sm_75" in caught.value.fix


def test_turing_named_twice_is_turing_alone() -> None:
    assert rtx_target_from_option("sm_75,sm_75").compute_capabilities == (75,)


@pytest.mark.parametrize("quantization", [None, "int8", "int8-weights"])
@pytest.mark.parametrize("cc", RTX_COMPUTE_CAPABILITIES)
def test_int8_is_for_every_target(quantization: str | None, cc: int) -> None:
    check_quantization(rtx_target_from_option(f"sm_{cc}"), quantization)


@pytest.mark.parametrize(("quantization", "lowest"), [("fp8", 89), ("int4", 80)])
@pytest.mark.parametrize("cc", RTX_COMPUTE_CAPABILITIES)
def test_each_format_begins_somewhere(quantization: str, lowest: int, cc: int) -> None:
    target = rtx_target_from_option(f"sm_{cc}")
    if cc >= lowest:
        check_quantization(target, quantization)
        return
    with pytest.raises(InputError, match=f"--{quantization} cannot be built for sm_{cc}"):
        check_quantization(target, quantization)


def test_fp8_for_the_default_targets_says_what_to_give() -> None:
    with pytest.raises(InputError, match="--fp8 cannot be built for sm_80, sm_86") as caught:
        check_quantization(rtx_target_from_option(None), "fp8")
    assert "without --gpu an engine is for sm_80, sm_86, sm_89, sm_120" in caught.value.why
    assert caught.value.fix == "give --gpu sm_89,sm_120, and build with --int8 for the other GPUs"


def test_the_targets_that_can_are_kept_in_the_advice() -> None:
    with pytest.raises(InputError) as caught:
        check_quantization(rtx_target_from_option("sm_86,sm_121"), "fp8")
    assert caught.value.fix.startswith("give --gpu sm_121, ")
    assert "without --gpu" not in caught.value.why
    with pytest.raises(InputError) as caught:
        check_quantization(rtx_target_from_option("sm_75"), "int4")
    assert caught.value.fix == "give --gpu sm_80,sm_86,sm_89,sm_120, and build with --int8-weights for the other GPUs"


def test_tensorrt_builds_for_the_gpu_that_is_present() -> None:
    assert tensorrt_target_from_option(None, 90) == Target(BackendName.TENSORRT, (90,), explicit=False)
    assert tensorrt_target_from_option("sm_90", 90) == Target(BackendName.TENSORRT, (90,))
    assert tensorrt_target_from_option("sm_100,sm_100", 100).names == ["sm_100"]


@pytest.mark.parametrize("gpu", ["sm_86", "sm_90,sm_86", "sm_999"])
def test_tensorrt_refuses_any_other_gpu(gpu: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        tensorrt_target_from_option(gpu, 90)
    assert caught.value.what == f"--gpu {gpu} cannot be built here with tensorrt"
    assert "the GPU of this machine, sm_90" in caught.value.why
    assert "--backend tensorrt-rtx" in caught.value.fix


def test_what_is_no_compute_capability_is_refused_for_tensorrt_as_well() -> None:
    with pytest.raises(InputError, match="--gpu 'H100' is not a compute capability") as caught:
        tensorrt_target_from_option("H100", 90)
    assert caught.value.why == "tensorrt builds for the GPU of this machine, sm_90"


def test_fp8_on_an_older_gpu_of_this_machine_is_not_sent_to_another_target() -> None:
    with pytest.raises(InputError) as caught:
        check_quantization(tensorrt_target_from_option(None, 86), "fp8")
    assert caught.value.what == "--fp8 cannot be built for sm_86, the GPU of this machine"
    assert caught.value.fix == "build with --int8, or on a newer GPU"
    check_quantization(tensorrt_target_from_option(None, 90), "fp8")
