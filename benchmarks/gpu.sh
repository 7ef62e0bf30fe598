#!/bin/sh
# Everything that one Hopper GPU can tell, in 8 minutes at the most; see gpu.py. PYTHON=path chooses the interpreter.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu.py" "$@"
