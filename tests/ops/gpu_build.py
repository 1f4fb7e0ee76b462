"""Builds Triton kernels for GPUs that are not there, and reads what the compiler says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TARGETS = [80, 90, 100]


def build(
    kernel: Any, signature: Mapping[str, Any], constants: Mapping[str, Any], capability: int, **options: int
) -> dict[str, int]:
    """Compile to a cubin for `sm_<capability>`; return registers and bytes of spilled (local) memory per thread.

    `signature` maps an argument to its type; those in `constants` are compile-time ones. `options` are
    Triton's, such as num_warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ordered = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=dict(constants))
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return resources(built.asm["cubin"])


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and local bytes per thread, from the disassembler that comes with Triton."""
    import tempfile

    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|LOCAL|STACK):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["LOCAL"] + found["STACK"]}
