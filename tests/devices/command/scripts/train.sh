#!/bin/bash
# ./train.sh --batch-size 16 --accum 2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

echo "training on $(hostname)"
PYTHONPATH=. python -c "import time; time.sleep(0.8)"  # As a script that prepares data, without PyTorch.
python -m module "$@"
echo "done"
