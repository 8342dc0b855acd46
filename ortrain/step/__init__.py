"""One call of a module as compiled programs: built once, run at every step."""

from ortrain.extras import require

require("torch", __name__)
