#!/usr/bin/env bash
# Trains models with a wheel of this tree, in an environment as pip makes it today: the newest
# versions that pyproject.toml allows, by none of the project's constraints. The environment takes
# 6 GB of the temporary folder (TMPDIR=), and goes with the run, however that ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' HUP INT TERM
export TMPDIR=$folder  # also for what PyTorch leaves there

.venv/bin/python -m hatchling build -t wheel -d "$folder"
.venv/bin/python -m venv "$folder/venv"
wheel=("$folder"/*.whl)
"$folder/venv/bin/pip" install --disable-pip-version-check -qq "${wheel[0]}[hf]"

# Not from the tree, where `import ortrain` would find the sources.
cp -r tests "$folder"
cd "$folder"
venv/bin/python -m tests.newest.training
