#!/usr/bin/env bash
# On a machine with a GPU and no network, in the root of the repository, with .build/gpu-day-wheels from `make
# gpu-day-wheels`: installs the packages into a folder of their own, and runs the day.
set -euo pipefail
python=$(command -v python3)
site=${TMPDIR:-/tmp}/gpu-day-site
"$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .build/gpu-day-wheels/*.whl
# A .pth file, not PYTHONPATH: processes that tests start find the packages, whatever their environment.
echo "$site" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gpu-day.pth"
export PATH=$site/bin:$PATH OMP_NUM_THREADS=4
nvidia-smi || true
exec "$python" -m tests.gpu.day
