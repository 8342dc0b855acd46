#!/usr/bin/env bash
# Trains with other libraries in an environment of its own, build/libraries-<torch>, of the newest
# versions beside one of torch: TORCH=2.13.0 by default. It stays, and is made anew where it is gone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
torch=${TORCH:-2.13.0}
folder=build/libraries-$torch
if [ ! -e "$folder/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/pip" install --disable-pip-version-check -q "torch==$torch"
  "$folder/bin/pip" install --disable-pip-version-check -q "torch==$torch" \
    --editable '.[hf,demo,peft]' --requirement tests/libraries/requirements.txt
  touch "$folder/.installed"
fi
"$folder/bin/python" -m tests.libraries "$@"
