"""rl.programs.dsl: the counts, the answers of every program against plain Python, and how often the writer is right."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import numpy as np
import pytest

from rl.programs import dsl, pool
from rl.programs.pool import Pool, Verdict


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# What the words mean, written here once more.
AGGREGATES = {"total": sum, "largest": max, "smallest": min, "ordered": sorted, "all": list}
MAPS = {
    "numbers": lambda v: v,
    "successors": lambda v: v + 1,
    "doubles": lambda v: 2 * v,
    "squares": lambda v: v**2,
    "opposites": lambda v: -v,
    "reductions": lambda v: v - 3,
    "halves": lambda v: (v - v % 2) // 2,
    "remainders": lambda v: v - 5 * (v // 5),
}
FILTERS = {
    "even": lambda v: v in range(-100, 100, 2),
    "odd": lambda v: v in range(-99, 100, 2),
    "triple": lambda v: v in range(-99, 100, 3),
    "triple-plus-one": lambda v: v in range(-98, 100, 3),
    "triple-plus-two": lambda v: v in range(-97, 100, 3),
    "positive": lambda v: v > 0,
    "negative": lambda v: v < 0,
}
CANONICAL = dict(
    itertools.chain.from_iterable(((word, words[0]) for word in words) for _, *words in dsl._THINGS)
)


def answer(description: str, x: list[int]) -> object:
    """What a description asks for, worked out from its words."""
    words = [CANONICAL[word] for word in description.split()]
    values = [v for v in x if all(FILTERS[word](v) for word in words if word in FILTERS)]
    for word in words:
        if word in MAPS:
            values = [MAPS[word](v) for v in values]
    return AGGREGATES[words[0]](values)


@pytest.mark.parametrize(("depth", "count"), [(1, 280), (2, 5120)])
def test_counts(depth: int, count: int, rng: np.random.Generator) -> None:
    everything = dsl.compositions(depth)
    assert len(everything) == len(set(everything)) == count
    train, held_out = dsl.split(everything, rng)
    assert (len(train), len(held_out)) == (count - count // 5, count // 5)
    assert set(train) | set(held_out) == set(everything)


@pytest.mark.parametrize(("depth", "stride"), [(1, 1), (2, 19)])
def test_the_tests_ask_for_what_the_words_say(depth: int, stride: int, rng: np.random.Generator) -> None:
    for composition in dsl.compositions(depth)[::stride]:
        problem = dsl.problem(composition, rng)
        expected = [f"assert f({x}) == {answer(problem.prompt, x)}" for x in dsl._INPUTS]
        assert problem.tests.splitlines() == expected
        namespace: dict = {}
        exec(problem.reference, namespace)
        exec(problem.tests, namespace)
        tokens = problem.prompt.split() + problem.reference.removeprefix(dsl.program("")).split()
        assert set(tokens) <= set(dsl.VOCABULARY)
        assert len(tokens) <= (25, 40)[depth - 1]


def test_no_two_problems_have_the_same_answers(rng: np.random.Generator) -> None:
    problems = [dsl.problem(composition, rng) for composition in dsl.compositions()]
    assert len({problem.tests for problem in problems}) == len({problem.name for problem in problems}) == 280


def test_a_writer_is_as_often_right_as_its_noise_says(rng: np.random.Generator) -> None:
    everything = dsl.compositions()
    assert all(
        dsl._HEAD + dsl.write(c, rng, dsl.Noise(0, 0)) == dsl.problem(c, rng).reference for c in everything
    )
    # Two of 5 aggregates, two of 8 maps and one of 7 filters are taken for others.
    right = (3 / 5 + 2 / 5 * 0.35) * (6 / 8 + 2 / 8 * 0.35) * (6 / 7 + 1 / 7 * 0.35)
    written = [(c, dsl.write(c, rng, dsl.Noise(0.65, 0))) for c in everything for _ in range(20)]
    share = np.mean([dsl._expression(c) == text for c, text in written])
    assert share == pytest.approx(right, abs=4 * (right * (1 - right) / len(written)) ** 0.5)
    # A slip changes the text unless it replaces a token by itself, or swaps the last or two that are equal.
    slipped = np.mean([dsl._expression(c) != dsl.write(c, rng, dsl.Noise(0, 1)) for c in everything])
    assert 0.9 < slipped < 1


@pytest.mark.slow
def test_programs_of_every_kind_are_written(rng: np.random.Generator) -> None:
    train, _ = dsl.split(dsl.compositions(), rng)
    problems = [dsl.problem(composition, rng) for composition in train]
    pairs = [(p, dsl.program(dsl.write(c, rng))) for p, c in zip(problems * 2, train * 2, strict=True)]
    with Pool(isolation="none") as runs:  # nothing that these tokens can say does harm
        assert set(runs.run([(problem, problem.reference) for problem in problems[:20]])) == {Verdict.PASSED}
        count = Counter(runs.run(pairs))
    share = {verdict: count[verdict] / len(pairs) for verdict in Verdict}
    assert 0.35 < share[Verdict.PASSED] < 0.55
    assert 0.25 < share[Verdict.FAILED] < 0.5
    assert 0 < share[Verdict.RUNTIME_ERROR] < 0.1
    assert 0.1 < share[Verdict.COMPILE_ERROR] < 0.3
    assert share[Verdict.TIMEOUT] == 0
    assert sum(pool.REWARDS[verdict] for verdict in count.elements()) / len(pairs) < 0.5


def test_hard_programs_are_rarely_right_and_mostly_run(rng: np.random.Generator) -> None:
    everything = dsl.compositions(2)
    written = [(c, dsl.write(c, rng, dsl.HARD)) for c in everything[::2]]
    assert 0.005 < np.mean([dsl._expression(c) == text for c, text in written]) < 0.05
    compiles = 0
    for _, text in written:
        with contextlib.suppress(SyntaxError):
            compiles += bool(compile(dsl.program(text), "", "exec"))
    assert compiles / len(written) > 0.6


def test_a_depth_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="1 or 2, got 3"):
        dsl.compositions(3)
