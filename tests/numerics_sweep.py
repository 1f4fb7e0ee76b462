"""Runs the tests under other instruction sets, thread counts and drawn cases: what rounds otherwise, or in another
order, must not fail. `make test-numerics` runs it; arguments are handed on to pytest.

Settings that a processor does not know are ignored by the libraries, so the sweep is worth most on a new one."""

from __future__ import annotations

import os
import subprocess
import sys

THREADS = {"OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "as it is": ({}, []),
    "torch without vectors": ({"ATEN_CPU_CAPABILITY": "default"}, []),
    "torch with AVX2": ({"ATEN_CPU_CAPABILITY": "avx2"}, []),
    "MKL with SSE4.2": ({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, []),
    "MKL's reproducible AVX2": ({"MKL_CBWR": "AVX2"}, []),
    "MKL's compatible products": ({"MKL_CBWR": "COMPATIBLE"}, []),
    "oneDNN with AVX2": ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, []),
    "numba for any processor": ({"NUMBA_CPU_NAME": "generic"}, []),
    "two threads": ({"OMP_NUM_THREADS": "2"}, []),
    **{
        f"other cases, seed {seed}": ({}, ["--hypothesis-profile", "default", "--hypothesis-seed", str(seed)])
        for seed in range(1, 6)
    },
}


def main(arguments: list[str]) -> int:
    """Run all settings, whatever fails, and say which did."""
    failed = []
    for name, (variables, options) in SETTINGS.items():
        shown = " ".join([*(f"{key}={value}" for key, value in variables.items()), "pytest", *options, *arguments])
        print(f"\n=== {name}: {shown}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *options, *arguments]
        if subprocess.run(command, env={**os.environ, **THREADS, **variables}).returncode:
            failed.append(name)
    print(f"\n{len(SETTINGS) - len(failed)} of {len(SETTINGS)} settings passed")
    for name in failed:
        print(f"failed: {name}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
