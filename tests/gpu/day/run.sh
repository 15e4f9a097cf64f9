#!/usr/bin/env bash
# On a machine with a GPU, Python 3.12 and no network, in the root of the repository: installs the wheels of `make
# gpu-day-wheels` into a folder of their own, and runs the day. The installation counts towards GPU_DAY_SECONDS (540).
#
#     bash tests/gpu/day/run.sh      # WHEELS: their folder (.build/gpu-day-wheels); OUT: the results (.build/gpu-day)
set -euo pipefail
begin=$SECONDS
python=${PYTHON:-$(command -v python3)}
site=${SITE:-${TMPDIR:-/tmp}/gpu-day-site}
export OUT=${OUT:-.build/gpu-day}
mkdir -p "$OUT"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
    "${WHEELS:-.build/gpu-day-wheels}"/*.whl
# A .pth file, not PYTHONPATH: processes that tests start find the packages, whatever their environment.
pth=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpu-day.pth
if ! echo "$site" > "$pth"; then
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
    echo "$pth cannot be written: tests that start kernels will not find the packages"
fi
export PATH=$site/bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
nvidia-smi > "$OUT/nvidia-smi.txt" 2>&1 || echo "there is no nvidia-smi"
"$python" -c "import anywidget, ipykernel, pytest, torch, zmq; print('torch', torch.__version__, 'CUDA', torch.version.cuda)"
export GPU_DAY_SECONDS=$(( ${GPU_DAY_SECONDS:-540} - (SECONDS - begin) ))
exec "$python" -m tests.gpu.day
