#!/usr/bin/env bash
# On a machine with a GPU: installs into the Python at hand, runs the GPU tests, and compares plain with speculative.
# Usage: scripts/device_check.sh [MODEL]   (MODEL: a .gguf file or folder; without one only the tests run)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -m pip install --quiet --editable . pytest hypothesis || echo "installation failed; trying with what is here"
"$python" -m outrider info
"$python" -m pytest tests/test_cuda.py -v
if [ $# -gt 0 ]; then
  "$python" -m outrider demo "$1" --device cuda
fi
