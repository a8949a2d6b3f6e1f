"""Program synthesis in words: a problem is said, a program answers, and its tests pay for it.

The reward of a program stands on its last token (`rl.programs.pool.REWARDS`: CodeRL; B-Coder, Yu et al. 2024, section
3). Programs run in a `rl.programs.pool.Pool`, nowhere else. Letter: ``B`` programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

from rl.envs.text import Dialogue, Game, Turn
from rl.programs.pool import REWARDS, Pool, Verdict, named
from rl.programs.problems import Problem

Text = Callable[[Problem, str], str]  # problem, completion -> the program that is judged


def whole(problem: Problem, completion: str) -> str:
    """The prompt and what completes it, as in HumanEval and MBPP."""
    return problem.prompt + completion


def until(stops: Sequence[str]) -> Text:
    """`whole`, but of the completion only what `before` leaves."""
    return lambda problem, completion: whole(problem, before(stops, completion))


def before(stops: Sequence[str], completion: str) -> str:
    """What of the completion stands before the first of these texts."""
    places = (completion.find(stop) for stop in stops)
    return completion[: min((place for place in places if place >= 0), default=None)]


def step(
    pool: Pool, problems: Sequence[Problem], completions: Sequence[str], text: Text = whole
) -> tuple[list[Verdict], np.ndarray]:
    """Judges one completion for each problem: the verdicts [B] and the rewards [B].

    Raises:
        ValueError: the tests of a problem do not compile or assert nothing.
        IsolationError: a worker of the pool died, and no other could be started.
    """
    verdicts = pool.run(zip(problems, map(text, problems, completions), strict=True))
    return verdicts, np.array([REWARDS[verdict] for verdict in verdicts])


def dialogue(problem: Problem, completion: str, verdict: Verdict) -> Dialogue:
    """A problem and its completion; what passed is what is worth imitating."""
    turns = Turn(problem.prompt), Turn(completion, True, REWARDS[verdict])
    return Dialogue(turns, imitate=float(verdict == Verdict.PASSED))


def game(pool: Pool, problems: Sequence[Problem], text: Text = whole) -> Game:
    """Problems to be solved in one move: each in turn, from a random one on. There is no data policy.

    All references are judged first, so that no problem can turn out to be unsound in the middle of a training.

    Raises:
        ValueError: no problem's reference passes its tests, or the tests of one do not compile or assert nothing.
        IsolationError: a worker of the pool died, and no other could be started.

    Warns:
        UserWarning: problems whose own reference does not pass their tests here, which are left out.
    """
    failing = pool.failing(problems)
    total, problems = len(problems), [problem for problem in problems if problem not in failing]
    if not problems:
        raise ValueError(
            f"of {total} problems none has a reference that passes its tests here: {named(failing)}. Raise the limits "
            "(of experiments.language: --program_seconds), or correct the references"
        )
    if failing:
        warnings.warn(
            f"{len(problems)} of {total} problems are played; the references of the others do not pass their tests "
            f"here: {named(failing)}",
            stacklevel=2,
        )

    def begin(episodes: int, rng: np.random.Generator) -> tuple[list[Problem], list[str]]:
        first = int(rng.integers(len(problems)))
        chosen = [problems[(first + i) % len(problems)] for i in range(episodes)]
        return chosen, [problem.prompt for problem in chosen]

    def move(
        chosen: list[Problem], texts: list[str], rng: np.random.Generator
    ) -> tuple[list[Problem], list[str], np.ndarray, np.ndarray]:
        return chosen, [""] * len(texts), step(pool, chosen, texts, text)[1], np.ones(len(texts), bool)

    return Game(begin, move, moves=1)
