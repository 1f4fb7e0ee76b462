#!/usr/bin/env bash
# On a machine with a CUDA device, in a checkout where `make setup` ran: holds every kernel, compiled, against its reference,
# then times them beside torch's SDPA over the full cache. Takes a few minutes; stops at the first failure.
#
#   benchmarks/gpu.sh [results.json]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

"$python" -c 'import torch; raise SystemExit(0 if torch.cuda.is_available() else "no CUDA device: nothing to check here")'
timeout 400 "$python" -m pytest -q -m gpu tests plugins
timeout 180 "$python" benchmarks/gpu.py ${1:+--json "$1"}
