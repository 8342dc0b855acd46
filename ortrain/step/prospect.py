"""Whether a graph will pay: what it costs to make, against what it saves in the steps to come.

Nobody knows how long a loop will run, but for a trainer. Of a loop that has lasted for some time it
is taken that it will last as long again: then a graph is made when what it saves in that time is
more than its cost, and a run that ends just behind the capture has lost the least share of its
time that a rule without foresight can promise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

# Seconds of a capture, of building and of the certificate: of a process's first capture, and for
# each layer (a module without children). Four layers of BERT-base, 57 layers in this sense, take
# 3.4 s in all on a Xeon; on an EPYC of the fourth generation 4.5 s, and 7 in bfloat16; six layers
# of MiniLM's shape, 81, 5.6 s there, and 8.1; a perceptron 0.3.
FIRST, LAYER = 0.2, 0.1
# The share of eager's time that engines have saved where they were kept.
GAIN = 0.25


@dataclass
class Prospect:
    """What is to be expected of a graph.

    Attributes:
        cost: seconds until it runs.
        gain: share of eager's time that it saves.
        steps: that are to come, where somebody knows.
        together: seconds until all parts of a module have graphs, of which this is one.
    """

    cost: float
    gain: float = GAIN
    steps: int | None = None
    together: float = 0.0

    @classmethod
    def of(cls, module: nn.Module) -> Prospect:
        """Of a module's graph."""
        layers = sum(1 for layer in module.modules() if not [*layer.children()])
        return cls(FIRST + LAYER * layers)

    def pays(self, elapsed: float, step: float) -> bool:
        """Whether the graph saves more than it costs.

        The time that a loop has lasted is that of all parts, and so is the cost set against it.

        Args:
            elapsed: seconds since the first step.
            step: seconds that a step takes now.
        """
        if self.steps is None:
            return elapsed * self.gain > max(self.cost, self.together)
        return self.steps * step * self.gain > self.cost

    def rest(self, elapsed: float) -> float:
        """Seconds for which a graph that does not pay now need not be thought of.

        Until the run has lasted long enough; where its length is known, steps may still become
        slower, and are looked at again once it is twice as old.

        Args:
            elapsed: seconds since the first step.
        """
        if self.steps is not None:
            return elapsed
        return max(self.cost, self.together) / self.gain - elapsed
