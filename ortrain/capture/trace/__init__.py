"""A trace: ``torch.export`` runs the module's Python code once, and records ATen operators.

- `ladder` has the ways of exporting a module, tried in order, and `exporter` one of them; before it
  `rehearsal` runs the forward on tensors without contents. `call` and `records` prepare the
  arguments.
- What code may do in a trace that it does in PyTorch: `checkpointing`, `layers`,
  `parametrized_draws`, `assigned_buffers`, branches on values (`value_checks`), arithmetic
  on sizes (`symbols`).
- What it may not: `custom_function`, `autograd_calls`, `seeding`, and what would tell a size or a
  number from what stands in for it (`stand_ins`). `refusal` puts an error in words of the user's
  code.
- What stays PyTorch's: `keeping` has its calls, `found` what they give; `rowwise` knows those that
  treat tokens alone, by their code (`closed_code`) and their operators (`token_axes`).
- What is learned: `decisions` about sizes, which have `outcomes`.
"""
