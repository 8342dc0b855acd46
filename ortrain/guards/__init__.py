"""When a graph may run: what a capture has taken for granted, compared at every call.

- `guard`: the module itself, with the state that its code reads (:mod:`ortrain.module_state`), and
  autocast around the call.
- `structure`: the form of a call, which becomes a list of tensors and a key. `numbers` among its
  arguments and `attributes` of the module are constants, or inputs where they change; outputs come
  back in their structure, a `key_value_cache` too.
- `constraints`: sizes.
"""

from ortrain.extras import require

require("torch", __name__)
