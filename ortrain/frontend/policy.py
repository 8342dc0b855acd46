"""``Policy``: who runs a held module's calls, and when that changes.

::

    watching ── a challenger pays ──▶ trying ── the clock decides ──▶ watching, with the winner
                                                       └ none is left ▶ settled

The ways are the plain module (``torch``), its equal blocks as graphs (``blocks``) and the whole
(``module``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ortrain.config import Engine
from ortrain.cpuinfo import slowness
from ortrain.frontend.autotune import Duel, Times
from ortrain.frontend.equal import equal_blocks
from ortrain.step import marks
from ortrain.step.overhead import Overhead
from ortrain.step.prospect import CERTIFICATE, FIRST, LAYER, Prospect, layers_in
from ortrain.step.report import Contest
from ortrain.step.sample import Sample
from ortrain.step.verdict import Verdict

if TYPE_CHECKING:
    from ortrain.step.recalled import Note

TORCH, BLOCKS, MODULE = "torch", "blocks", "module"

# A graph that is likely to take more seconds than this comes behind blocks, whatever it gains: the
# first graph is there soon.
SOON = 5.0
# What everything behind the first graph may take, as a share of the run so far.
SHARE = 0.1
# What a challenger's graphs may take at least, in seconds, and twice what they are thought to.
LEAST = 2.0
# Calls that need a further graph each, after which a way is not tried any more.
MISSES = 8
CHANGES = "what its code depends on changes from call to call: a graph for each takes too long"
# Steps of PyTorch that take so many times what an earlier process has noted, or less of it, were or
# are those of a busy machine.
BUSY = 2.0
# The share of the whole's gain that blocks have, that of padding aside, which they compute: of
# Llama 0.9, of BERT 0.7.
OF_BLOCKS = 0.75
# Blocks that take more than this share of what the whole takes are not tried. The block of
# four layers of Llama takes 0.7 of it. It is the way that is left where the whole's graphs end
# within its code.
CHEAP = 0.75
# Seconds that the first conversion of a process takes to load Dynamo, onnx and the front end.
LOADING = 0.9
_FRONT_END = "ortrain.frontend.graphs"
# A way that has saved less than this share of what was foreseen was not the first graph: the next
# one need not wait until the run has paid for both.
POOR = 0.5
# Steps that a loop is likely to take: a way that pays by then is tried at once.
LIKELY = 40
# What a way may cost, times what is foreseen, where it is weighed against another, or against a
# number of steps that is known: a block of Llama's under autocast took 5.2 s on an EPYC of the
# fourth generation, not 2.1.
RISK = 2.0
# What graphs of code that ends them within take, times what it took to find that out: Dynamo traces
# the code up to a break twice more.
PARTED = 4.0


@dataclass(frozen=True)
class Challenger:
    """A way that is to be tried.

    Attributes:
        way: its name.
        cost: seconds that it takes to make, about.
        gain: the share of eager's time that it is likely to save.
        in_parts: the same where graphs end within the code: padding that crosses is computed. None
            where it is not another one.
    """

    way: str
    cost: float
    gain: float
    in_parts: float | None = None


class Verdicts:
    """What the first of the processes that train together has found of a module's calls.

    Args:
        name: of the module and of the calls, the same in each process.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def leads(self) -> bool:
        """Whether this process decides."""
        verdict = Verdict.of(self.name)
        return verdict is None or verdict.leads

    def of_all(self, challenger: str, winner: str) -> tuple[str, str] | None:
        """The latest challenger that the first process has tried, and what has won there.

        None as long as there is none: nobody waits for it.

        Args:
            challenger: that this process has tried.
            winner: that it has found.
        """
        own = Verdict.of(f"{self.name}/{challenger}")
        if own is None or own.leads:
            told = winner if own is None else own.settled(winner)
            return challenger, told
        for way in (MODULE, BLOCKS):
            verdict = Verdict.of(f"{self.name}/{way}")
            if verdict is not None and (told := verdict.settled("")):
                return way, told
        return None


def padding_in(kwargs: Mapping[str, Any]) -> float:
    """The share of a batch that its ``attention_mask`` says is padding; 0 without one."""
    mask = kwargs.get("attention_mask")
    if type(mask) is not Tensor or mask.dim() != 2 or not mask.numel() or mask.is_meta:
        return 0.0
    return 1 - torch.count_nonzero(mask).item() / mask.numel()


def challengers_of(
    module: nn.Module, gain: float, *, trains: bool, padding: float = 0.0
) -> list[Challenger]:
    """The ways of a module to graphs, those that are tried first in front.

    Args:
        module: the module.
        gain: the share of eager's time that a graph of the whole is likely to save.
        trains: whether the calls have gradients.
        padding: the share of a batch that is padding, which a graph of the whole leaves out.
    """
    slow = slowness()
    cost = (FIRST + LAYER * layers_in(module)) * slow
    whole = Challenger(MODULE, cost, 1 - (1 - gain) * (1 - padding), in_parts=gain)
    if not trains or not (blocks := equal_blocks(module)):
        return [whole]
    kinds = {_kind(block): block for block in blocks}.values()
    layers = sum(map(layers_in, kinds))
    parts = Challenger(BLOCKS, (FIRST + 3 * LAYER * layers) * slow, gain * OF_BLOCKS)
    return [parts, whole] if parts.cost < CHEAP * whole.cost else [whole]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What blocks have in common that one graph serves."""
    return type(block), *(parameter.shape for parameter in block.parameters())


class Policy:
    """Of calls with gradients or without, in training or in evaluation.

    Args:
        way: that runs the first calls.
        overhead: of the module.
        challengers: ways that are to be tried, in order.
        prospect: who knows how many steps are to come; None where a graph pays in any case.
        verdicts: of the processes that train together; None alone.
        reason: why the first calls run in PyTorch.
        engine: that runs graphs.
        note: on what an earlier process has found; None where nothing is kept.

    Attributes:
        way: that has won so far.
        reason: why calls run in PyTorch.
        spell: calls that go to the module unseen.
        refused: why calls of a form have no graph.
        contest: what was measured.
        asked: whether files of its graphs are asked for, whatever these cost.
        saved: whether they are written.
    """

    def __init__(
        self,
        way: str,
        overhead: Overhead,
        challengers: Sequence[Challenger] = (),
        prospect: Prospect | None = None,
        verdicts: Verdicts | None = None,
        *,
        reason: str = "",
        engine: Engine = "torch",
        note: Note | None = None,
    ) -> None:
        self.way, self.overhead, self.reason, self.engine = way, overhead, reason, engine
        self.challengers, self.prospect, self._verdicts = [*challengers], prospect, verdicts
        self._note = self._kept = note
        self._recalled: Contest | None = None
        self.spell = 0
        self.refused: dict[Any, str] = {}
        self.asked = self.saved = False
        self.contest: Contest | None = Contest() if challengers else None
        self._began = marks.clock()
        self._known = Times()
        self._duel: Duel | None = None
        self._samples: list[Sample] = []
        self._last: _Into | None = None
        self._look_at = 0.0
        self._first = 0.0  # what the first graph has taken
        self._spent = self._allowed = 0.0  # before the duel that is under way, and in it
        self._missed = 0

    @property
    def settled(self) -> bool:
        """Whether nothing changes any more."""
        return self._duel is None and not self.challengers

    def next(self) -> str:
        """The way of the next call."""
        self._samples = [each for each in self._samples if not each.settle()]
        duel = self._duel
        if duel is not None:
            if not duel.winner:
                return duel.turn
            return self._decide(duel)
        asks = self.challengers and marks.clock() >= self._look_at and self._known.enough(1)
        if asks and self._note is not None:
            self._recall(self._note)
            asks = bool(self.challengers)
        if asks and (chosen := self._paying()) is not None:
            if self._recalled is not None:
                return self._follow(self._recalled, chosen)
            self._duel = Duel(self.way, chosen.way, self._known)
            self._spent, self._allowed = self.overhead.made, max(2 * chosen.cost, LEAST)
            return chosen.way
        return self.way

    @property
    def measures(self) -> bool:
        """Whether the next call's time is asked for."""
        return self._duel is not None or bool(self.challengers and not self._known.enough(1))

    @property
    def may_convert(self) -> bool:
        """Whether there may be a further graph: not where that has taken too much of the run."""
        if self.contest is None or (self.asked and not self.saved):
            return True
        share = SHARE * (marks.clock() - self._began)
        if not self._first:
            return self.overhead.made - self._spent <= max(self._allowed, share)
        return self.overhead.total - self._first <= share

    def expect_parts(self) -> None:
        """Takes it that graphs of the whole will end within its code."""
        self.challengers = [
            each
            if each.in_parts is None
            else replace(each, gain=each.in_parts, cost=each.cost * PARTED, in_parts=None)
            for each in self.challengers
        ]

    def may_part(self) -> bool:
        """Whether the way that is tried is worth it, now that its code ends graphs within.

        If it is not, it waits, as one that costs so much.
        """
        duel = self._duel
        if duel is None or self.prospect is None:
            return self.may_convert
        made, horizon = self.overhead.made - self._spent, self._horizon(self.prospect)
        tried = next(each for each in self.challengers if each.way == duel.challenger)
        slow = max(1.0, made / tried.cost)  # so many times what was foreseen, as others will be
        known = {each.way: replace(each, cost=each.cost * slow) for each in self.challengers}
        cost = PARTED * made
        gain = tried.gain if tried.in_parts is None else min(tried.gain, tried.in_parts)
        known[tried.way] = replace(tried, cost=cost, gain=gain)
        saves = {way: each.gain * horizon - each.cost for way, each in known.items()}
        if saves[tried.way] >= max(0.0, *saves.values()):
            return True
        self._duel, self.challengers = None, [*known.values()]
        return False

    def void(self) -> None:
        """The call that is under way has run otherwise than was meant: its time is not counted."""
        if self._last is not None:
            self._last.counts = False

    def missed(self) -> None:
        """Notes a call that would have needed a further graph, and was allowed none."""
        self._missed += 1
        if self._duel is not None and self._missed >= MISSES:
            self.forfeit(self._duel.challenger, CHANGES)

    def sample(self, way: str, size: int, start: Any) -> Sample:
        """The time of a step that begins; nothing is noted where it has overhead in it."""
        self._last = into = _Into(self, way, size)
        sample = Sample(cast(Any, into), size, start, _ignored)
        self._samples.append(sample)
        return sample

    def forfeit(self, way: str, reason: str) -> None:
        """A way cannot run these calls."""
        self.challengers = [each for each in self.challengers if each.way != way]
        if self.contest is not None:
            self.contest.refused[way] = reason
        if self._duel is not None and way == self._duel.challenger:
            self._duel = None
        if self.way == way:
            self.way = TORCH
        if self.settled:
            self.reason = reason
            self._close()

    def note(self, way: str, seconds: float, size: int) -> None:
        """Notes the seconds of a step, for each unit of its size."""
        duel = self._duel
        if duel is None:
            if way == self.way:
                self._known.add(seconds, size)
        elif way == duel.turn:
            duel.add(seconds, size)
            self._tell(duel, size)

    def _paying(self) -> Challenger | None:
        """A challenger whose time has come; None says when to ask again."""
        elapsed, step = marks.clock() - self._began, self._known.step
        if self.prospect is None:
            return self.challengers[-1]
        paying = [each for each in self.challengers if self._pays(each, elapsed, step)]
        if self.contest is not None:
            self.contest.waits = not paying
        if paying:
            horizon = self._horizon(self.prospect)
            if paying[0].way == BLOCKS and paying[-1].cost > SOON:
                return paying[0]
            return max(paying, key=lambda each: each.gain * horizon - RISK * each.cost)
        self._look_at = marks.clock() + max(step, elapsed / 8)
        if self.way == TORCH:  # by what it takes then, a graph will be judged
            if self.contest is not None:
                self.contest.eager = self._known.seconds
            self._known = Times()
        return None

    def _horizon(self, prospect: Prospect) -> float:
        """Seconds that the run is likely to go on for as it is."""
        elapsed, step = marks.clock() - self._began, self._known.step
        return max(elapsed, LIKELY * step) if prospect.steps is None else prospect.steps * step

    def _pays(self, each: Challenger, elapsed: float, step: float) -> bool:
        """Whether a way will save more than it costs, as far as anybody knows."""
        assert self.prospect is not None
        left, cost = self.prospect.steps, each.cost
        if _FRONT_END not in sys.modules:
            cost += LOADING * slowness()
        if self._first and self.overhead.total - self._first + cost > SHARE * elapsed:
            return False
        if left is not None:
            return (left * each.gain - CERTIFICATE) * step > RISK * cost
        # A first one is tried at once where it pays in a loop of a usual length.
        is_long = not self._first and LIKELY * step * each.gain > cost
        return is_long or elapsed > (cost + CERTIFICATE * step) / each.gain

    def _recall(self, note: Note) -> None:
        """Takes what an earlier process has found, where steps take about as long as they did."""
        found, self._note = note.read(), None
        if found is None or self.contest is None:
            return
        contest, size = found
        before, now = median(contest.eager) / size, median(self._known.counted)
        if not before / BUSY < now < before * BUSY:
            return
        contest.recalled = True
        if contest.winner == "graph":
            self._recalled = contest
            return
        self._tell_others(MODULE, TORCH)
        self.contest, self.challengers, self.reason = contest, [], str(contest)
        self._close()

    def _follow(self, found: Contest, chosen: Challenger) -> str:
        """Runs what an earlier process has found to be fastest."""
        names = [each.way for each in self.challengers]
        way = BLOCKS if found.engine == BLOCKS else MODULE
        self._spent, self._allowed = self.overhead.made, max(2 * chosen.cost, LEAST)
        if way in names:
            self.challengers = self.challengers[names.index(way) + 1 :]
            self._tell_others(way, way)
            self.way, self.contest, self._known = way, found, Times()
        self._recalled = None
        return self.way

    def _decide(self, duel: Duel) -> str:
        """Takes the verdict; until there is one in all processes, PyTorch runs."""
        about, told = duel.challenger, duel.winner
        if self._verdicts is not None:
            verdict = self._verdicts.of_all(about, told)
            if verdict is None:
                return TORCH
            about, told = verdict
        self._duel = None
        left = {each.way: each for each in self.challengers}
        names = [*left]
        self.challengers = self.challengers[names.index(about) + 1 if about in left else 0 :]
        if duel.challenger in left and not self._learn(duel, left[duel.challenger]):
            self._first = self._first or self.overhead.total
        if told not in (TORCH, duel.champion, duel.challenger):
            if told in left:  # which the first process has come to by another way
                self._first, self._spent = 0.0, self.overhead.total
                self._allowed = max(2 * left[told].cost, LEAST)
            else:
                told = TORCH
        self.way, self._known = told, Times()
        self._conclude(duel)
        if self.settled:
            self._close()
        return self.way

    def _learn(self, duel: Duel, challenger: Challenger) -> bool:
        """Takes what a way has saved for what those behind it will save as well.

        Returns:
            Whether that was little, and others are to be tried.
        """
        best, before = (_mean(duel.times[each]) for each in (duel.challenger, duel.champion))
        if not before or not self.challengers:
            return False
        saved = max(1 - best / before, 0.0)
        now = saved if duel.winner == duel.challenger else 0.0
        for place, each in enumerate(self.challengers):
            more = each.gain - challenger.gain + saved - now
            self.challengers[place] = replace(each, gain=more / (1 - now))
        return saved < POOR * challenger.gain

    def _tell_others(self, challenger: str, winner: str) -> None:
        if self._verdicts is not None:
            self._verdicts.of_all(challenger, winner)

    def _conclude(self, duel: Duel) -> None:
        contest = self.contest
        if contest is None:
            return
        contest.left, contest.winner = 0, "eager" if self.way == TORCH else "graph"
        contest.engine = "" if self.way == TORCH else self._label(self.way)
        losers = [name for name in duel.times if name != self.way]
        best = _mean(duel.times.get(self.way, []))
        size = self._size
        lost = sum((t - best) * size for name in losers for t in duel.times[name] if t > best)
        self.overhead.add("autotuning", lost)
        contest.cost = self.overhead.total
        if self.way == TORCH:
            self.reason = str(contest)
        if self._kept is not None:
            self._kept.write(contest, size)

    def _tell(self, duel: Duel, size: int) -> None:
        contest, self._size = self.contest, size
        if contest is None:
            return
        for name, times in duel.times.items():
            seconds = [t * size for t in times]
            if name == TORCH:
                contest.eager = seconds or contest.eager
            elif seconds:
                contest.engines[self._label(name)] = seconds
        contest.left = 1

    def _label(self, way: str) -> str:
        return self.engine if way == MODULE else way

    _size = 1

    def _close(self) -> None:
        for sample in self._samples:
            sample.close()
        self._samples.clear()
        if self.settled and self.way == TORCH:
            self.spell = sys.maxsize


class _Into:
    """Where a sample puts its time."""

    def __init__(self, policy: Policy, way: str, size: int) -> None:
        self.policy, self.way, self.size = policy, way, size
        self.counts, self._before = True, policy.overhead.total

    def append(self, seconds: float) -> None:
        """Takes a time, where it is that of a step alone."""
        if self.counts and self.policy.overhead.total == self._before:
            self.policy.note(self.way, seconds, self.size)


def _mean(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2] if times else 0.0


def _ignored() -> None:
    """Nobody asks."""
