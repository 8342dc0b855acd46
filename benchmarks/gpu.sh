#!/usr/bin/env bash
# Figures of a graphics card and of the processor beside it, in eight minutes a run. What is in
# results/ is not measured again: run it until nothing is left. --dry-run shows on any machine that
# all of it runs, on models that are too small to measure anything.
#
#     benchmarks/gpu.sh [--minutes 8] [--dry-run] [--list]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD"
exec "$python" -W ignore benchmarks/gpu.py "$@"
