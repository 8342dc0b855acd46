"""One call of a module as compiled programs: built once, run at every step.

- `runner` decides for each call what runs it: `states` of the module and `forms` of call are known,
  `eligibility` says what no graph serves, `fallback` has errors that PyTorch answers, `report`
  tells.
- `compiler` finds the compiled step of a call, or captures the module and has `build` make one.
- `autograd` runs it: `feeds` of its forward, what that leaves (`saved_forward`), its `backward`,
  and gradients that no graph gives (`replay`).
- `certificate` compares it with the module: each one's `evidence` in `digest`s, their `agreement`,
  on the same random `draws`.
- `contest` times it against PyTorch, when the `prospect` is good; `verdict` is for all processes
  and `marks` are where the time is read. `progress` tells who waits.
"""

from ortrain.extras import require

require("torch", __name__)
