"""Attention in code space in Triton: against the reference in the interpreter, and built for each target."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu_build import TARGETS, build
from test_packed_attention import CAPS, CASES, agree, make

from kvframe.errors import InputError
from kvframe.ops import packed_attention


def module():
    """The kernels; the package of the same name as its function hides them from an import statement."""
    return importlib.import_module("kvframe.ops.packed_attention.triton")


def test_the_kernel_matches_the_reference():
    pytest.importorskip("triton")
    # Triton decides when it is imported whether it interprets, so this takes a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(CASES) * len(CAPS)), "checked"]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("levels", "scales", "channels", "caps"),
    [(True, "bf16", 192, False), (False, "u8", 64, False), (True, "bf16", 192, True), (False, "u8", 64, True)],
)
def test_the_kernel_builds_for_gpus_and_spills_nothing(capability, levels, scales, channels, caps):
    pytest.importorskip("triton")
    kernels = module()
    floats = ("query", "constant", "shift", "levels", "log_multiplicity", "out", "lse")
    signature = dict.fromkeys((*floats, "key_scale_table", "value_scale_table"), "*fp32")
    signature |= dict.fromkeys(("places", "offsets"), "*i64")
    signature |= dict.fromkeys(("key_words", "value_words", "key_table", "value_table"), "*i32")
    signature |= dict.fromkeys(("key_scales", "value_scales"), f"*{scales}")
    sizes = ("n_pairs", "n_queries", "groups", "heads", "key_channels", "value_channels", "key_widest", "value_widest")
    signature |= dict.fromkeys((*sizes, "split"), "i32") | {"softcap": "fp32"}
    constants = {
        "KEY_LEVELS": not levels,
        "VALUE_LEVELS": levels,
        "BYTES": scales == "u8",
        "CAPS": caps,
        "WEIGHTED": True,
        "BLOCK_M": kernels.BLOCK_M,
        "BLOCK_K": kernels.BLOCK_K,
        "BLOCK_V": 1 << (channels - 1).bit_length(),
    }
    made = build(kernels.attend_kernel, signature, constants, capability, num_warps=kernels.WARPS)
    assert made["spilled"] == 0, made


@pytest.mark.parametrize("capability", TARGETS)
def test_the_merge_of_joint_heads_spills_nothing(capability):
    pytest.importorskip("triton")
    from kvframe.ops.ragged_attention.triton import merge_kernel

    signature = dict.fromkeys(("outs", "lses", "out", "lse"), "*fp32") | dict.fromkeys(("n_rows", "n_splits"), "i32")
    made = build(merge_kernel, signature, {"DIM": 193, "BLOCK_D": 256, "BLOCK_P": 16}, capability)
    assert made["spilled"] == 0, made


def test_by_name_it_never_falls_back():
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="runs on CUDA devices, but the query is on cpu"):
            packed_attention(*make(*CASES["one group"])[0], impl="triton")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("softcap", CAPS)
def test_the_kernel_on_a_gpu(name, softcap):
    agree(make(*CASES[name])[0], "triton", "cuda", softcap)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    module().SPLIT, module().BLOCK_V = 4, 16  # several splits, several chunks of value channels
    for each in CASES.values():
        for cap in CAPS:
            agree(make(*each)[0], "triton", softcap=cap)
    print(len(CASES) * len(CAPS), "checked")
