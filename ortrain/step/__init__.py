"""One call of a graph as compiled programs: built once, run at every step.

- `build` makes the plan of a step: its forward and the pieces of its backward, compiled.
- `autograd` runs it: `feeds` of its forward, what that leaves (`saved_forward`), its `backward`,
  outputs that are computed from others (`chain`), and gradients that no graph gives (`replay`).
- Parity: each run's `evidence` in `digest`s, their `agreement`, on the same random `draws`.
- `report` tells what ran; `prospect` has what a graph is likely to cost and to save, `sample` times
  a call, `marks` are where the time is read, `verdict` is one for all processes, and `progress`
  tells who waits.
"""

from ortrain.extras import require

require("torch", __name__)
