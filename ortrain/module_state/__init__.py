"""The state of a module: everything that its ``forward`` may read or write.

`survey` walks it, as far as `scope` says, along the names that `reach` finds in bytecode, and notes
each `fact`; which `hooks` count is said once. Each `holder` is a place that can be compared and put
back, by the equality of `value`. `untouched` puts back what a trace has changed, `modes` the
training flags alone.
"""

from ortrain.extras import require

require("torch", __name__)
