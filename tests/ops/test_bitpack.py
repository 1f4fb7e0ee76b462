"""Packed codes: every width, odd sizes, blocks that are not full, appending, and the kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kvframe.errors import InputError
from kvframe.ops import bitpack

WIDTHS = range(17)


def random_codes(channels: int, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**width, (channels, rows), generator=generator)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("channels", "blocks"), [(1, 1), (3, 1), (1, 3), (7, 5), (192, 2), (5, 0), (0, 2)])
def test_unpacking_inverts_packing(width, channels, blocks):
    codes = random_codes(channels, 32 * blocks, width)
    words = bitpack.pack(codes, width)
    assert words.shape == (blocks, width, channels)
    assert words.dtype == torch.int32
    back = bitpack.unpack(words, width)
    assert back.dtype == (torch.uint8 if width <= 8 else torch.int32)
    assert torch.equal(back.long(), codes)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_the_fast_path_is_the_reference(width, dtype):
    if width > 8 and dtype == torch.uint8:
        dtype = torch.int32
    codes = random_codes(6, 96, width).to(dtype)
    words = bitpack.pack(codes, width, impl="reference")
    assert torch.equal(bitpack.pack(codes, width, impl="swar"), words)
    assert torch.equal(bitpack.unpack(words, width, impl="swar"), bitpack.unpack(words, width, impl="reference"))
    # Views of one block are contiguous with strides that are not those of a new tensor.
    one = words[1:2, :, 2:3]
    assert torch.equal(bitpack.unpack(one, width, impl="swar").long(), codes[2:3, 32:64].long())


@pytest.mark.parametrize(
    "segments",
    [((8, 2), (5, 1), (4, 7), (1, 3)), ((3, 5),), ((11, 2), (9, 1), (8, 3), (2, 2)), ((6, 1), (0, 4)), ((0, 2),), ()],
)
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_mixed_widths_are_packed_segment_by_segment(segments, blocks):
    pieces = [random_codes(count, 32 * blocks, width, width) for width, count in segments]
    codes = torch.cat(pieces) if pieces else torch.zeros(0, 32 * blocks, dtype=torch.int64)
    words = bitpack.pack_mixed(codes, segments)
    each = [
        bitpack.pack(piece, width, "reference").flatten(1) for piece, (width, _) in zip(pieces, segments, strict=True)
    ]
    assert words.dtype == torch.int32
    assert torch.equal(words, torch.cat(each, 1) if each else torch.zeros(blocks, 0, dtype=torch.int32))


def test_mixed_widths_are_checked():
    for segments in (((2, 1), (3, 1)), ((3, 1),)):
        with pytest.raises(InputError, match="segments of 2 channels, widest first"):
            bitpack.pack_mixed(torch.zeros(2, 32, dtype=torch.uint8), segments)


def test_the_layout_is_what_it_says():
    codes = torch.zeros(2, 64, dtype=torch.int64)
    codes[1, 37] = 0b101
    words = bitpack.pack(codes, 3)
    expected = torch.zeros(2, 3, 2, dtype=torch.int32)
    expected[1, 0, 1] = expected[1, 2, 1] = 1 << 5
    assert torch.equal(words, expected)


@pytest.mark.parametrize(
    ("lengths", "more"),
    [([32], [32]), ([31], [1]), ([1], [64]), ([33], [95]), ([0], [5]), ([7], [0]), ([5, 0, 64], [60, 3, 1])],
)
def test_joined_words_hold_the_codes_of_both(lengths, more):
    first, second = bitpack.Runs(tuple(lengths)), bitpack.Runs(tuple(more))
    a, b = random_codes(4, first.rows, 5, 1), random_codes(4, second.rows, 5, 2)
    words = [bitpack.pack(runs.pad(codes), 5).flatten(1) for runs, codes in ((first, a), (second, b))]
    joined = first.join(words[0], second, words[1])
    both = first + second
    assert len(joined) == sum(both.blocks)
    expected = first.join_rows(a.T, second, b.T).T
    assert torch.equal(both.trim(bitpack.unpack(joined.view(-1, 5, 4), 5)).long(), expected)
    assert torch.equal(joined, bitpack.pack(both.pad(expected), 5).flatten(1)), "lanes without a row stay zero"


def test_bad_input_is_refused_in_a_sentence():
    with pytest.raises(InputError, match="0 to 16 bits, but 17"):
        bitpack.pack(torch.zeros(1, 32), 17)
    with pytest.raises(InputError, match="pad the last block"):
        bitpack.pack(torch.zeros(1, 33), 2)
    with pytest.raises(InputError, match=r"words \[M, 3, C\]"):
        bitpack.unpack(torch.zeros(1, 2, 4, dtype=torch.int32), 3)
    with pytest.raises(InputError, match="no implementation 'cuda'"):
        bitpack.pack(torch.zeros(1, 32), 2, impl="cuda")


def test_triton_without_a_gpu_says_so():
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs everywhere")
    with pytest.raises(InputError, match="need a GPU"):
        bitpack.pack(torch.zeros(1, 32, dtype=torch.int32), 2, impl="triton")


INTERPRETED = """
import torch
from kvframe.ops import bitpack
for width in (0, 1, 3, 8, 11, 16):
    for channels, blocks in ((1, 1), (33, 3), (40, 2)):
        codes = torch.randint(0, 2**width, (channels, 32 * blocks), generator=torch.Generator().manual_seed(width))
        words = bitpack.pack(codes, width, impl="reference")
        assert torch.equal(bitpack.pack(codes, width, impl="triton"), words), (width, channels)
        back = bitpack.unpack(words, width, impl="triton")
        assert torch.equal(back.long(), codes) and back.dtype == bitpack.unpack(words, width).dtype, (width, channels)
print("equal")
"""


def test_the_triton_kernels_are_the_reference():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", ["_pack", "_unpack"])
def test_the_triton_kernels_compile(capability, name):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvframe.ops.bitpack import triton as kernels

    first, second = ("codes", "words") if name == "_pack" else ("words", "codes")
    signature = {first: "*i32", second: "*i32", "channels": "i32", "rows": "i32", "WIDTH": "constexpr"}
    source = ASTSource(
        fn=getattr(kernels, name),
        signature={**signature, "TILE": "constexpr"},
        constexprs={"WIDTH": 5, "TILE": kernels.TILE},
    )
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
