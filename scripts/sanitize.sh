#!/usr/bin/env bash
# The native tests under the address and undefined-behaviour sanitizers; needs the environment that `make test` made.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
[ -x "$python" ] || { echo "run 'make test' first: it makes .venv"; exit 1; }
build=$PWD/build/sanitize
PATH="$PWD/.venv/bin:$PATH" cmake -S native -B "$build" -DCMAKE_BUILD_TYPE=Release -DOUTRIDER_SANITIZE=ON -DPython_EXECUTABLE="$python"
PATH="$PWD/.venv/bin:$PATH" cmake --build "$build" -j "$(nproc)"
# A copy of the package with the instrumented extension in the place of the installed one.
rm -rf "$build/tree" && mkdir -p "$build/tree"
cp -r outrider tests pyproject.toml "$build/tree/"
rm -f "$build"/tree/outrider/_native*.so
cp "$build"/_native*.so "$build/tree/outrider/"
cd "$build/tree"
preload=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so)
# Without site (-S) no hook of an editable install puts the package of the working tree before this one.
export PYTHONPATH=$build/tree:$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc
"$python" -S -c "import outrider._native as n; assert n.__file__.startswith('$build'), n.__file__"
"$python" -S -m pytest -q -p no:cacheprovider tests/ops tests/engine/test_lossless_native.py "$@"
