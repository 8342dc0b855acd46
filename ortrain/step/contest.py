"""Eager against the graph on real steps: the faster one stays.

Eager runs the first steps until a graph is likely to pay (:mod:`~ortrain.step.prospect`), of which
few are watched; then each engine has its turn, and then eager again. So a short run never pays for
a capture, and no two hold their memory at the same time. Those that are clearly slower leave; where
the result is close, the others run again.

An engine that could at best be a little faster than the others costs as much to build as they do.
It is a rival: it meets the engine that has won once the run is long enough for that little to pay.

Of eager's first turn it is only counted that a graph is clearly slower, or faster beyond doubt. The
machine is cold in it: the first four steps of MiniLM in bfloat16 take 0.8 s on an EPYC, all others
0.49, whatever runs them.

Both contestants are timed the same way, by autograd hooks on the outputs and on what receives a
gradient, so that neither work outside the module nor the optimizer counts. Every timed step is a
real training step: nothing is computed only to be measured.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ortrain.runtime.engines import LineUp
from ortrain.runtime.memory import release_pools
from ortrain.step import marks
from ortrain.step.marks import Mark
from ortrain.step.prospect import GAIN, LEAD, Prospect
from ortrain.step.recalled import Note
from ortrain.step.report import Contest, median
from ortrain.step.sample import Sample
from ortrain.step.verdict import Verdict

# A turn lasts until so many of its steps are timed, and either this time or this number is reached.
LEAST_STEPS, MOST_STEPS, ENOUGH_SECONDS = 3, 50, 0.2
# First steps of a turn that are not counted: memory pools grow and caches fill.
WARM_UP = 1
# Turns of each contestant at most, and the difference that needs no further one. After a single
# turn it has to be twice as large: a neighbour of the machine slowed GPT-2's three steps by 0.15.
MOST_ROUNDS, CLEAR = 3, 0.1
# Eager's steps on a cold machine were up to 1.7 times as slow as later ones: a graph below this
# share of the fastest needs no second look at eager, which took a twentieth of an epoch of SST-2.
SURE = 0.5
# Where eager has run before, or runs once more, its steps are those of a warm machine. With a graph
# below this share of the fastest more of them would tell nothing: for the verdict to be wrong each
# had to be 1.5 times as slow as it is. Of 200 steps of MiniLM on an EPYC, eager's eight took 0.04.
PLAIN, COLD_STEPS = 0.65, 1
# An earlier process's verdict counts where eager's steps take as long as then, up to this factor.
ALIKE = 2.0
# The graph has to be faster by more than what the medians scatter: a wrong verdict for it costs
# time in every step to come, a wrong one for eager only what little there was to win.
MARGIN = 0.98


def _ignored() -> None:
    """Nobody asks."""


class Race:
    """Gives the contestants turns and decides.

    Args:
        engines: that run the graph, in the order of their turns.
        prospect: whether a graph pays; without one it always does.
        gain: the share of eager's time that one is likely to save.
        verdict: of all processes that train together; None where this one is alone.
        note: for later processes; None where none is kept.

    Attributes:
        contest: what it has found, for reports.
        rest: calls for which nobody need ask whose turn it is: eager's, unwatched.
        winner: ``"eager"`` or an engine; empty while it runs.
    """

    def __init__(
        self,
        engines: Sequence[str],
        prospect: Prospect | None = None,
        gain: float = GAIN,
        verdict: Verdict | None = None,
        note: Note | None = None,
    ) -> None:
        self.contest, self.verdict, self.note = Contest(), verdict, note
        self.prospect, self.gain, self._began = prospect, gain, marks.clock()
        self.winner, self.rest = "", 0
        self.contestants = [*engines, "eager"]
        self._champion = "eager"  # who stays unless another is faster by more than the noise
        self._rested, self._told = 0.0, None if prospect is None else prospect.steps
        self._asking = 0.0  # seconds that the last question has taken
        self._turn, self._calls, self._rounds = "eager", 0, 0
        self._cold = 0.0  # the median of eager's first turn, once that is over
        self._waited = False  # whether eager had run before that
        self._step = 0.0  # seconds of a step of eager's, once it has waited
        self._chosen, self._reserve = False, list[str]()
        self._own = ""  # the winner of this process's contest
        self._times: dict[str, list[float]] = {name: [] for name in self.contestants}
        self._counted: dict[str, list[float]] = {name: [] for name in self.contestants}
        self._medians: dict[str, list[float]] = {name: [] for name in self.contestants}
        self._sizes: deque[int] = deque(maxlen=MOST_STEPS)
        self._ran = Counter[str]()  # steps of each that were timed
        self._samples: list[Sample] = []
        self._known = None if note is None else note.read()

    @property
    def rivals(self) -> tuple[str, ...]:
        """Engines that the winner is still to meet."""
        return self.contest.rivals

    def next(self) -> str:
        """Who runs the next step: ``"eager"`` or an engine."""
        if self.winner:
            if not self.rivals or not self._rivals_pay():
                return self.winner
            self._meet_rivals()
        if self._own:
            return self._settle()
        asked = marks.clock()
        turn = self._next(asked)
        self._asking = marks.clock() - asked
        return turn

    def _next(self, asked: float) -> str:
        if self._rests(asked):
            self.rest = self._calls_until(self._rested, asked)
            return "eager"
        self.rest = 0
        self._calls += 1
        self._samples = [s for s in self._samples if not s.settle()]
        if self._turn_is_over():
            if not self._pays():
                return self._turn
            if self._known is not None and self._recalls(*self._known):
                return self._settle()
            for sample in self._samples:  # none of this turn's is for the next one
                sample.settle(wait=True)
            if self._ends_turn():
                return self._decide()
            self._pass_on()
        self._tell()
        return self._turn

    def _recalls(self, known: Contest, size: float) -> bool:
        """Whether it ends with what an earlier process has found, at steps of a size.

        Not where eager takes another time now: the machine was, or is, busy with something else.
        """
        self._known = None
        then, now = median(known.eager) / size, median(self._times["eager"][WARM_UP:])
        if not then / ALIKE < now < then * ALIKE:
            return False
        contest = self.contest
        contest.engines, contest.eager, contest.left = known.engines, known.eager, 0
        contest.refused, contest.recalled, self._chosen = known.refused, True, True
        contest.rivals = tuple(name for name in known.rivals if name in self._times)
        for name, times in known.engines.items():
            self._counted[name] = [t / size for t in times]
        self._counted["eager"] = [now]
        self._own = known.engine or "eager"
        return True

    def _ends_turn(self) -> bool:
        """Counts the steps of a turn that is over; whether the race is."""
        turn = self._turn
        times = self._times[turn][WARM_UP:]
        self._times[turn].clear()
        release_pools()  # no two hold their memory at the same time
        if turn == "eager":
            if self._is_cold():
                self._counted[turn], self._cold = times, median(times) or math.inf
                return False
            if not self._rounds:
                self._counted[turn].clear()
        self._counted[turn] += times
        if times:
            self._medians[turn].append(median(times))
        if turn == self.contestants[-1]:
            self._rounds += 1
            return self._rounds == MOST_ROUNDS or self._is_clear()
        last = self.contestants[-2:] == [turn, "eager"]
        if self._rounds or not last or not (self._is_hopeless() or self._is_sure()):
            return False
        self._medians["eager"].append(self._cold)
        return True

    def _is_cold(self) -> bool:
        """Whether eager has its first turn."""
        return self._turn == "eager" and not self._cold

    def _is_hopeless(self) -> bool:
        """Whether even on a cold machine eager was clearly faster than each engine."""
        return self._cold <= self._of_the_fastest_engine() * (1 - 2 * CLEAR)

    def _is_sure(self) -> bool:
        """Whether an engine is faster than eager could be on a warm machine."""
        cold = self._counted["eager"]
        if len(cold) < LEAST_STEPS:
            return False
        share = PLAIN if self._waited else SURE
        return 0 < self._of_the_fastest_engine() < min(cold) * share

    def _is_plain(self) -> bool:
        """Whether an engine is faster than eager beyond doubt, of which this is the second turn."""
        steps = self._times["eager"][WARM_UP:]
        second = self._turn == "eager" and self._cold and not self._rounds
        if not second or not steps:
            return False
        return 0 < self._of_the_fastest_engine() < min([*self._counted["eager"], *steps]) * PLAIN

    def _of_the_fastest_engine(self) -> float:
        """The median of its steps; 0 where one has not been timed."""
        return min((median(self._counted[name]) for name in self.contestants[:-1]), default=0.0)

    def _pays(self) -> bool:
        """Whether it is time to make the graph; eager goes on until it is."""
        if not self._is_cold() or self.prospect is None:
            return True
        now, times = marks.clock(), self._times["eager"]
        elapsed, self._step = now - self._began, median(times[WARM_UP:]) * self._size()
        pays = self.prospect.pays(elapsed, self._step, self.gain)
        self.contest.waits = not pays
        if not pays:
            self._tell()
            self._waited = True
            times.clear()  # by what it takes then, a graph will be judged
            self._calls, self._told = 0, self.prospect.steps
            rest = self.prospect.rest(elapsed, self._step, self.gain)
            self._rested = now + max(rest - self._turn_of(self._step), 0.0)
        if self._waited:
            self._ran.clear()  # steps before a graph is due are no cost of it
        return pays

    def _turn_of(self, step: float) -> float:
        """Seconds of a turn of steps that take so long."""
        return WARM_UP * step + min(max(LEAST_STEPS * step, ENOUGH_SECONDS), MOST_STEPS * step)

    def _rivals_pay(self) -> bool:
        """Whether the run is long enough for the winner to meet its rivals."""
        if self.prospect is None:
            return True
        now = marks.clock()
        if self._rests(now):
            return False
        prospect = self.prospect.of_rival()
        elapsed, step = now - self._began, median(self._counted[self.winner]) * self._size()
        self._told, self._rested = prospect.steps, now + prospect.rest(elapsed, step, LEAD)
        return prospect.pays(elapsed, step, LEAD)

    def _rests(self, now: float) -> bool:
        """Whether what did not pay need not be thought of yet."""
        prospect = self.prospect
        return prospect is not None and now < self._rested and self._told == prospect.steps

    def _meet_rivals(self) -> None:
        """Has them run against the winner, as the winner did against eager."""
        release_pools()
        self._champion, self.contestants = self.winner, [*self.rivals, self.winner]
        self._turn, self._calls, self._rounds = self.contestants[0], 0, 0
        self._rested, self.winner, self._own = 0.0, "", ""
        self._ran.clear()
        self.contest.rivals, self.contest.recalled = (), False
        for known in (self._times, self._counted, self._medians):
            for each in known.values():
                each.clear()

    def _calls_until(self, end: float, now: float) -> int:
        """How many of eager's steps come before that, this one among them."""
        return max(int((end - now) / self._step), 1) if self._step else 1

    def choose(self, line_up: Callable[[Sequence[str]], LineUp]) -> str:
        """Lines up the engines, once the graph is known; whose turn it is then.

        Args:
            line_up: which of some engines start, one at least, and which are their rivals.
        """
        if not self._chosen:
            self._chosen = True
            known = self.contestants[:-1]
            starters, rivals = line_up(known)
            # Of processes that train together, each would have to have them at the same step.
            self.contest.rivals = rivals if self.verdict is None else ()
            self._reserve = [name for name in known if name not in starters]
            self.contestants[:-1] = [name for name in known if name in starters]
            if self._turn not in self.contestants:
                self._turn = self.contestants[0]
        return self._turn

    def first(self, line_up: Callable[[Sequence[str]], LineUp]) -> str:
        """The engine that will have the first turn; lines them up by a graph that is known early.

        Args:
            line_up: as of :meth:`choose`.
        """
        self.choose(line_up)
        return self.contestants[0]

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """What is done inside is done for the contest, and part of its cost."""
        start = marks.clock()
        try:
            yield
        finally:
            self.contest.cost += marks.clock() - start

    def _lost(self) -> float:
        """Seconds that the steps of the others took longer than the winner's."""
        known = {name: median(times) for name, times in self._counted.items() if times}
        best = known.get(self.winner, math.inf)
        longer = (self._ran[name] * max(time - best, 0.0) for name, time in known.items())
        return sum(longer) * self._size()

    def forfeit(self, engine: str, why: str = "") -> bool:
        """Takes out an engine that cannot run the graph; whether another one is left.

        Where none is, those that did not start have their turn.
        """
        self.contest.refused[engine] = why
        if self._turn == engine:
            self._pass_on()
        left = [name for name in self.contestants if name not in (engine, "eager")]
        if not left and self._reserve:
            left, self._reserve, self.contest.rivals = self._reserve, [], ()
            self._turn = left[0]
        if engine == self._champion or not left:
            self._champion = "eager"  # which the others have not met
        self.contestants = [*left, "eager"] if self._champion == "eager" else left
        if self._turn not in self.contestants:
            self._turn = self.contestants[0]
        return bool(left)

    def _pass_on(self) -> None:
        """Gives the turn to the next contestant; the last one may have left with its turn."""
        here = self._turn
        place = self.contestants.index(here) + 1 if here in self.contestants else 0
        self._turn, self._calls = self.contestants[place % len(self.contestants)], 0

    def _turn_is_over(self) -> bool:
        # Forwards that never come to their backward are not waited for.
        if self._calls > 4 * (MOST_STEPS + WARM_UP):
            return True
        counted = self._times[self._turn][WARM_UP:]
        if len(counted) < self._least(cold=self._is_cold()) and not self._is_plain():
            return False
        return len(counted) >= MOST_STEPS or sum(counted) * self._size() >= ENOUGH_SECONDS

    def _least(self, *, cold: bool) -> int:
        """How many steps of a turn are timed at least."""
        return COLD_STEPS if cold and not self._waited else LEAST_STEPS

    def _tell(self) -> None:
        """Notes in the contest how far it has come."""
        size = self._size()
        times = {name: [*self._counted[name], *self._times[name][WARM_UP:]] for name in self._times}
        self._note(times)

        def calls(name: str, cold: bool = False) -> int:
            # An engine's first turn is taken to be as long as eager's.
            seconds = median(times[name] or times["eager"]) * size
            enough = math.ceil(ENOUGH_SECONDS / seconds) if seconds else 0
            return WARM_UP + min(max(enough, self._least(cold=cold)), MOST_STEPS)

        here = -1 if self._is_cold() else self.contestants.index(self._turn)
        left = max(calls(self._turn, self._is_cold()) - len(self._times[self._turn]), 1)
        self.contest.left = left + sum(calls(name) for name in self.contestants[here + 1 :])

    def _note(self, times: dict[str, list[float]]) -> None:
        """Notes times in seconds a step of typical size."""
        size, contest = self._size(), self.contest
        seconds = {name: [t * size for t in found] for name, found in times.items()}
        contest.eager = seconds.pop("eager") or contest.eager
        contest.engines = {name: found for name, found in seconds.items() if found}

    def _is_clear(self) -> bool:
        """Whether one is left after those that are clearly slower than the fastest have gone."""
        known = {name: median(self._counted[name]) for name in self.contestants}
        if not all(known.values()):
            return True
        best, clear = min(known.values()), CLEAR if self._rounds > 1 else 2 * CLEAR
        near = [name for name in self.contestants if known[name] * (1 - clear) <= best]
        if len(near) > 1:
            self.contestants = near
        return len(near) == 1

    def sample(
        self, contestant: str, size: int, start: Mark, again: Callable[[], None] = _ignored
    ) -> Sample:
        """The time of one step.

        Args:
            contestant: who runs it.
            size: what its time is proportional to.
            start: when its forward began, by :func:`now`.
            again: called where a backward makes gradients that can be differentiated again.
        """
        self._sizes.append(size)
        self._ran[contestant] += 1
        # A graph's began before it was asked whose turn it is, which takes as long as a small one.
        if contestant != "eager" and isinstance(start, float):
            start += self._asking
        self._samples.append(Sample(self._times[contestant], size, start, again))
        return self._samples[-1]

    def close(self) -> None:
        """Ends without a decision."""
        for sample in self._samples:
            sample.close()
        self._samples.clear()

    def _size(self) -> float:
        return median([float(s) for s in self._sizes])

    def _decide(self) -> str:
        self.contest.left = 0
        self._note(self._counted)
        champion = self._champion
        others = self._counted.keys() - {champion, *self.contest.refused}
        known = {name: median(t) for name, t in self._counted.items() if t and name in others}
        ran = [name for name in self.contestants if name != champion]
        best = min(known, key=known.__getitem__) if known else (ran or [champion])[0]
        # Rounds in which both ran: what slows a machine down for a while slows both. Without times
        # of both there is no contest, and the graph is what was asked for.
        pairs = zip(self._medians.get(best, []), self._medians[champion], strict=False)
        ratios = [mine / its for mine, its in pairs]
        wins = median(ratios) <= MARGIN if ratios else champion == "eager"
        self._own = best if wins else champion
        return self._settle()

    def _settle(self) -> str:
        """Takes the verdict, or runs eagerly until there is one."""
        told = self._own if self.verdict is None else self.verdict.settled(self._own)
        if not told:
            self._samples = [s for s in self._samples if not s.settle()]
            return "eager"
        runs = told in self._times and told not in self.contest.refused
        self.winner = told if runs else "eager"
        self.close()
        self.contest.winner = "eager" if self.winner == "eager" else "graph"
        self.contest.engine = "" if self.winner == "eager" else self.winner
        self.contest.cost += self._lost()
        if self.winner == "eager":
            self.contest.rivals = ()
        if self.note is not None and not self.contest.recalled:
            self.note.write(self.contest, self._size())
        return self.winner
