"""Functions of tensors that are recorded once as CUDA graphs and replayed.

A function of hundreds of short kernels takes the time of their launches; a recording of it is one
launch. It reads and writes at fixed addresses, which is what this file is about:

- *Held* inputs (parameters, buffers, what a forward saves) are read where they lie. Their addresses
  are part of a recording's key, so that it is only replayed on tensors that lie there.
- Other inputs are copied into memory of the recording's own, and seeds as keys of their streams
  (:mod:`~ortrain.runtime.aten.hash`). Tensors on the host are numbers that the function reads:
  their values are part of the key.
- What is saved for a backward stays in the recording's memory. As long as anybody has it, neither
  this recording is replayed nor any earlier one, whose scratch may lie there: another recording is
  made for such calls, or the plain function runs instead.
- All other outputs are copied out before anything else can be replayed.

So whatever lies at an address that is read is what the plain function would be given. What cannot
be recorded is found by running the function once under `watch`, and runs as it is. `recorders`
record on a device, `recordings` are what a function has of them.
"""
