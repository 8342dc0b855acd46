"""From ATen to ONNX.

`translations` has our own, `registry` asks PyTorch's exporter for a model made with them,
`torchlib` says which of PyTorch's are trusted beside them, and `doubles` that none loses digits.
`lift` makes a program of the model; `fingerprint` names it in a cache; `replay` has the formulas of
the translations that draw random numbers once more, on tensors.
"""
