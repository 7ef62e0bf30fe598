#!/bin/sh
# Everything that one Hopper GPU can tell, in 9 minutes at the most; see gpu/gpu.py. PYTHON=path chooses the interpreter.
root="$(cd "$(dirname "$0")/.." && pwd)"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.gpu.gpu "$@"
