"""Small programs with small tests, as many as one likes: ``AGGREGATE ( [ MAP for v in x if FILTER ] )``.

A description names an aggregate, maps and filters in words; the program is one Python expression of a list ``x``. With
one map and one filter these are the 280 problems of a toy for B-Coder; with two of each 5,120, and longer programs.
Whoever writes programs here is an imperfect model: it confuses some things with others, always the same ones, and
slips now and then, so that a language model trained on what it wrote is often wrong where it is most certain.

Texts are tokens with spaces between them, from `VOCABULARY`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rl.programs.problems import Problem

# Each: code, then words for it.
_AGGREGATES = (
    ("sum", "total", "sum-of"),
    ("max", "largest", "maximum"),
    ("min", "smallest", "minimum"),
    ("sorted", "ordered", "ascending"),
    ("list", "all", "every"),
)
_MAPS = (
    ("v", "numbers", "values"),
    ("v + 1", "successors", "increments"),
    ("v * 2", "doubles", "twofolds"),
    ("v * v", "squares", "second-powers"),
    ("- v", "opposites", "negations"),
    ("v - 3", "reductions", "three-lowers"),
    ("v // 2", "halves", "half-downs"),
    ("v % 5", "remainders", "residues"),
)
_FILTERS = (
    ("v % 2 == 0", "even", "parity-zero"),
    ("v % 2 == 1", "odd", "parity-one"),
    ("v % 3 == 0", "triple", "thirds-zero"),
    ("v % 3 == 1", "triple-plus-one", "thirds-one"),
    ("v % 3 == 2", "triple-plus-two", "thirds-two"),
    ("v > 0", "positive", "above-zero"),
    ("v < 0", "negative", "below-zero"),
)
_EXCLUSIVE = ({0, 1}, {2, 3, 4}, {5, 6})  # filters that no number passes together
# What the imperfect writer takes for something else: index to index.
_CONFUSED_AGGREGATES = {1: 2, 3: 4}
_CONFUSED_MAPS = {3: 2, 6: 7}
_CONFUSED_FILTERS = {1: 0}

_HEAD = "def f ( x ) : return "
# Both signs of every remainder of six, so that two filters leave numbers to choose from. No two of the 280 problems
# have the same answers.
_INPUTS = (
    [-14, 18, 11, -7, 7, -9, 9, -12, 16, -17, -22, 20],
    [6, -1, -5, -24, 5, 2, -22, 22, 21, -14, -3, 7],
    [-8, -22, 1, -6, -21, 16, 15, 6, -7, -23, 11, 8],
    [11, 14, -13, 4, -6, -14, -15, 9, 1, -23, 6, -16],
    [8, 18, -5, -13, -20, 16, 23, 15, -9, -16, 1, -12],
)


class Composition(NamedTuple):
    """What a program shall do: indices of an aggregate, of maps in the order of application, of filters."""

    aggregate: int
    maps: tuple[int, ...]
    filters: tuple[int, ...]


class Noise(NamedTuple):
    """How imperfect a writer is."""

    confusion: float = 0.65  # probability, for each thing that can be taken for another, that it is
    slips: float = 0.3  # probability that a token is left out, doubled, swapped, or another of its kind
    misreading: float = 0.0  # probability, for each thing, that it is taken for any of its kind


USUAL = Noise()
HARD = Noise(misreading=0.5)
"""With this, of programs of depth 2 fewer than one in twenty are right, and most others run."""


def compositions(depth: int = 1) -> list[Composition]:
    """All that have this many maps and as many filters, none of which exclude each other: 280, or 5,120 of depth 2.

    Raises:
        ValueError: the depth is not 1 or 2.
    """
    if depth not in (1, 2):
        raise ValueError(f"depth must be 1 or 2, got {depth}")
    filters = [
        chosen
        for chosen in itertools.combinations(range(len(_FILTERS)), depth)
        if not any(len(group & set(chosen)) > 1 for group in _EXCLUSIVE)
    ]
    maps = itertools.product(range(len(_MAPS)), repeat=depth)
    return [Composition(*parts) for parts in itertools.product(range(len(_AGGREGATES)), maps, filters)]


def split(
    everything: Sequence[Composition], rng: np.random.Generator, held_out: float = 0.2
) -> tuple[list[Composition], list[Composition]]:
    """Those to learn from and those held out, in random order: of 280, 224 and 56."""
    order = rng.permutation(len(everything))
    cut = round(held_out * len(everything))
    return [everything[i] for i in order[cut:]], [everything[i] for i in order[:cut]]


def problem(composition: Composition, rng: np.random.Generator) -> Problem:
    """The problem, described in words that are drawn from each thing's synonyms; five tests."""
    expression = _expression(composition)
    answers = [eval(expression, {"x": values}) for values in _INPUTS]
    tests = "\n".join(f"assert f({x}) == {y}" for x, y in zip(_INPUTS, answers, strict=True))
    name = f"dsl/{composition.aggregate}-{'.'.join(map(str, composition.maps + composition.filters))}"
    return Problem(name, _describe(composition, rng), tests, ("f",), _HEAD + expression)


def write(composition: Composition, rng: np.random.Generator, noise: Noise = USUAL) -> str:
    """The expression that an imperfect writer gives for it; `program` makes a program of that."""

    def read(index: int, confused: dict[int, int], kind: tuple) -> int:
        if rng.random() < noise.misreading:
            return int(rng.integers(len(kind)))
        return confused[index] if index in confused and rng.random() < noise.confusion else index

    understood = Composition(
        read(composition.aggregate, _CONFUSED_AGGREGATES, _AGGREGATES),
        tuple(read(index, _CONFUSED_MAPS, _MAPS) for index in composition.maps),
        tuple(read(index, _CONFUSED_FILTERS, _FILTERS) for index in composition.filters),
    )
    tokens = _expression(understood).split()
    return " ".join(_slip(tokens, rng) if rng.random() < noise.slips else tokens)


def program(expression: str) -> str:
    """The text to run, of an expression."""
    return _HEAD + expression


def _expression(composition: Composition) -> str:
    value = "v"
    for i, index in enumerate(composition.maps):
        code = _MAPS[index][0].split()
        value = " ".join((f"( {value} )" if i else value) if token == "v" else token for token in code)
    condition = " and ".join(_FILTERS[index][0] for index in composition.filters)
    return f"{_AGGREGATES[composition.aggregate][0]} ( [ {value} for v in x if {condition} ] )"


def _describe(composition: Composition, rng: np.random.Generator) -> str:
    things = [_AGGREGATES[composition.aggregate]]
    things += [_MAPS[index] for index in composition.maps] + [
        _FILTERS[index] for index in composition.filters
    ]
    return " ".join(words[rng.integers(len(words))] for _, *words in things)


def _slip(tokens: list[str], rng: np.random.Generator) -> list[str]:
    i = int(rng.integers(len(tokens)))
    before, token, after = tokens[:i], tokens[i], tokens[i + 1 :]
    match rng.integers(4):
        case 0:
            return [
                *before,
                str(rng.choice([other for other in CODE if _kind(other) == _kind(token)])),
                *after,
            ]
        case 1:
            return [*before, *after]
        case 2:
            return [*before, token, token, *after]
        case _:
            return [*before, *after[:1], token, *after[1:]]


def _kind(token: str) -> str:
    return "number" if token.isdigit() else "word" if token.isalpha() else "sign"


def _tokens(texts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(token for text in texts for token in text.split()))


_THINGS = (*_AGGREGATES, *_MAPS, *_FILTERS)
CODE = _tokens([code for code, *_ in _THINGS] + [_expression(Composition(0, (0,), (0,))), "and"])
VOCABULARY = CODE + _tokens([word for _, *words in _THINGS for word in words])
