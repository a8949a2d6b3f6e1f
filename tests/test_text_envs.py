"""rl.envs.wordle, rl.envs.double_t_maze: the rules by hand, published statistics, exact values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rl.agents import robust_vi
from rl.envs import double_t_maze as maze
from rl.envs import programs, tabular, wordle
from rl.envs.text import Dialogue, Turn, play
from rl.programs.pool import Verdict
from rl.programs.problems import Problem

WORDS = ("crane", "slate", "trace", "eerie", "geese", "abbey")

# ---- Wordle ---------------------------------------------------------------------------------------------------------


def colours(guess: str, hidden: str) -> str:
    return "".join("g" if g == h else "y" if g in hidden else "b" for g, h in zip(guess, hidden, strict=True))


def test_feedback_by_the_rule() -> None:
    env = wordle.make(WORDS)
    for i, guess in enumerate(WORDS):
        for j, hidden in enumerate(WORDS):
            feedback = wordle.feedback_text(env.feedback[i, j])
            assert feedback == " ".join(colours(guess, hidden)) + "\n"
    # Duplicates are not counted: all three e of eerie are coloured although crane has one.
    assert wordle.feedback_text(env.feedback[3, 0]) == "y y y b g\n"
    assert (np.diag(env.feedback) == wordle.SOLVED).all()


def test_a_game_by_hand() -> None:
    env, rng = wordle.make(WORDS), np.random.default_rng(0)
    state = wordle.reset(env, 2)
    state, feedback, reward = wordle.step(env, state, np.array([0, wordle.NO_WORD]), rng, bad_word=-10.0)
    left = [WORDS[i] for i in np.flatnonzero(state.consistent[0])]
    assert left == [
        word for word in WORDS if colours("crane", word) == wordle.feedback_text(feedback[0])[::2].strip()
    ]
    assert feedback[1] == wordle.NO_WORD and state.consistent[1].all() and wordle.feedback_text(-1) == "\n"
    assert state.tries.tolist() == [1, 1] and reward[1] == -10.0
    for _ in range(5):
        last = np.flatnonzero(state.consistent[0])[0]
        state, feedback, reward = wordle.step(env, state, np.array([last, wordle.NO_WORD]), rng)
    assert state.done.all() and feedback[1] == wordle.NO_WORD
    before = state
    state, _, reward = wordle.step(env, state, np.array([1, 1]), rng)
    assert (state.tries == before.tries).all() and (reward == 0).all()


def test_the_game_ends_with_the_word(rng: np.random.Generator) -> None:
    env = wordle.make(WORDS[:1])
    state, feedback, reward = wordle.step(env, wordle.reset(env, 3), np.zeros(3, int), rng)
    assert state.done.all() and (reward == 0).all() and (feedback == wordle.SOLVED).all()


def test_hidden_words_are_uniform_over_the_consistent_ones(rng: np.random.Generator) -> None:
    env = wordle.make(WORDS)
    state = wordle.reset(env, 6000)._replace(consistent=np.tile([1, 1, 0, 1, 0, 0], (6000, 1)).astype(bool))
    _, feedback, _ = wordle.step(env, state, np.zeros(6000, int), rng)
    count = Counter(feedback.tolist())
    assert set(count) == {int(env.feedback[0, j]) for j in (0, 1, 3)}
    assert all(abs(number - 2000) < 200 for number in count.values())


def test_a_game_in_words() -> None:
    env = wordle.make(WORDS)
    won = [env.feedback[1, 0], wordle.SOLVED, *[wordle.NO_WORD] * 4]
    games = wordle.Games(np.array([[1, 0, -1, -1, -1, -1]]), np.array([won]))
    assert wordle.dialogue(env, games, 0) == Dialogue(
        (
            Turn("Wordle:\n"),
            Turn("s l a t e\n", True, -1.0),
            Turn("b b g b g\n"),
            Turn("c r a n e\n", True, 0.0),
            Turn("g g g g g\n"),
        )
    )
    assert (
        games.returns.tolist() == [-1] and games.length.tolist() == [2] and games.success.tolist() == [True]
    )
    assert wordle.parse(env, "s l a t e\n") == 1 and wordle.parse(env, "s l a t\n") == wordle.NO_WORD


@pytest.fixture(scope="module")
def game(data_file: Callable[[str], Path]) -> wordle.Wordle:
    words = wordle.read_words(data_file("words/wordle_official_400.txt"))
    assert len(words) == 431
    return wordle.make(words)


def make_informed() -> wordle.Policy:
    """The policy behind LMRL-Gym's upper score: of the consistent words the one whose feedback says most on average.

    Of several equally good ones the first. It remembers its choice for every state it has seen.
    """
    choices: dict[bytes, int] = {}

    def choose(env: wordle.Wordle, mask: np.ndarray) -> int:
        words = np.flatnonzero(mask)
        table = env.feedback[np.ix_(words, words)]
        count = np.stack([np.bincount(row, minlength=3**wordle.LETTERS) for row in table])
        # W times the expected log of how many are left
        remaining = (count * np.log(np.maximum(count, 1))).sum(1)
        return int(words[remaining.argmin()])

    def policy(env: wordle.Wordle, state: wordle.State, rng: np.random.Generator) -> np.ndarray:
        guess = np.full(len(state.done), wordle.NO_WORD)
        for i in np.flatnonzero(~state.done):
            key = state.consistent[i].tobytes()
            if key not in choices:
                choices[key] = choose(env, state.consistent[i])
            guess[i] = choices[key]
        return guess

    return policy


@pytest.mark.parametrize(
    ("policy", "games", "returned", "within"),
    [
        # What LMRL-Gym's table 1 says of its data: -4.12 (1.59), length 4.82 (1.27), success 0.70.
        (wordle.logged, 8000, -4.12, 0.06),
        (make_informed(), 1500, -1.94, 0.07),  # its upper score
        (wordle.consistent, 4000, -2.35, 0.06),
        (wordle.uniform, 4000, -5.95, 0.03),
    ],
)
def test_returns_are_the_published_ones(
    game: wordle.Wordle, policy: wordle.Policy, games: int, returned: float, within: float
) -> None:
    played = wordle.play(game, policy, games, np.random.default_rng(1))
    assert played.returns.mean() == pytest.approx(returned, abs=within)
    if policy is wordle.logged:
        assert played.returns.std() == pytest.approx(1.59, abs=0.04)
        assert played.length.mean() == pytest.approx(4.82, abs=0.05)
        assert played.length.std() == pytest.approx(1.27, abs=0.04)
        assert played.success.mean() == pytest.approx(0.70, abs=0.015)


@pytest.mark.parametrize("words", [[], ["crane", "crane"], ["four"], ["CRANE"]])
def test_words_that_are_none(words: list[str]) -> None:
    with pytest.raises(ValueError, match="different words of five letters"):
        wordle.make(words)


# ---- the double-T maze ----------------------------------------------------------------------------------------------


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def clone(walks: tabular.Episodes) -> np.ndarray:
    """How often each action was taken in each state, [26, 4]."""
    count = np.zeros((26, 4))
    np.add.at(count, (walks.state[walks.valid], walks.action[walks.valid]), 1)
    return count


def greedy(table: np.ndarray) -> float:
    """The mean return over the starts of acting greedily by a table [26, 4]."""
    return maze.returns(lambda state: table.argmax(1)[state], STARTS).mean()


STARTS = np.array([state for state in range(26) if state != maze.GOAL])


def test_the_optimum_is_the_published_one(float64: None) -> None:
    mdp = maze.mdp()
    tabular.check(mdp)
    assert (len(maze.CELLS), maze.CELLS[maze.GOAL]) == (26, (8, 6))
    plan = robust_vi.value_iteration(mdp, 1.0)
    assert np.asarray(mdp.start) @ np.asarray(plan.value) == pytest.approx(-6.84, abs=1e-9)
    assert greedy(np.asarray(plan.q)) == pytest.approx(-6.84)
    # By distance, counted on the map: 12 moves from the left end of its bar.
    assert np.asarray(plan.value)[[maze.CELLS.index((7, 6)), maze.CELLS.index((1, 1))]].tolist() == [0, -11]


def test_moving_at_random(rng: np.random.Generator) -> None:
    starts = np.tile(STARTS, 200)
    returned = maze.returns(lambda state: rng.integers(4, size=len(state)), starts)
    assert returned.min() == -101
    assert returned.mean() == pytest.approx(-85.6, abs=1.0)
    assert (returned > -101).mean() == pytest.approx(0.25, abs=0.02)


def test_a_move_by_hand() -> None:
    crossing, corner, above = (maze.CELLS.index(cell) for cell in ((5, 6), (1, 1), (7, 6)))
    states, rewards = maze.step(
        np.array([crossing, corner, above, above]), np.array([3, 0, 3, maze.NO_ACTION])
    )
    assert [maze.CELLS[state] for state in states] == [(6, 6), (1, 1), (8, 6), (7, 6)]
    assert rewards.tolist() == [-1, -1, 0, -4]
    assert maze.see(crossing) == "5 6 . . # .\n" and maze.see(corner) == "1 1 # . # #\n"
    assert [maze.parse(text) for text in ("left\n", "down", "north\n")] == [0, 3, maze.NO_ACTION]


def test_logged_walks_show_the_way_only_in_pieces(rng: np.random.Generator) -> None:
    walks = maze.logged(rng)
    assert walks.state.shape == (1240, 100)
    np.testing.assert_array_equal(walks.next_state, maze.step(walks.state, walks.action)[0])
    following = walks.state[:, 1:] == walks.next_state[:, :-1]
    assert following[walks.valid[:, 1:]].all()
    ends = walks.next_state == maze.GOAL
    success = (ends & walks.valid).any(1)
    assert success.mean() == pytest.approx(0.18, abs=0.03)
    returned = -walks.valid.sum(1) + np.where(success, 1, -1)
    assert returned.mean() == pytest.approx(-90, abs=2)
    # No walk comes from the bars of the T to the goal, and yet every best move is there.
    top = [maze.CELLS[state][0] <= 2 for state in walks.state[success, 0]]
    assert not any(top)
    assert (clone(walks) > 0)[STARTS].all()


def test_cloning_is_optimal_only_on_the_published_design(rng: np.random.Generator) -> None:
    published = maze.logged(rng, published=True)
    assert greedy(clone(published)) == pytest.approx(-6.84)
    assert greedy(clone(maze.logged(rng))) < -90
    # There the same move has two outcomes: in one part it leads on, in another it is not made.
    moved = published.next_state == maze.step(published.state, published.action)[0]
    assert not moved[published.valid].all()


def test_a_walk_in_words(rng: np.random.Generator) -> None:
    walks = maze.logged(rng, 40)
    for walk in range(40):
        dialogue = maze.dialogue(walks, walk)
        actions = [turn for turn in dialogue.turns if turn.is_action]
        assert len(actions) == walks.valid[walk].sum() and len(dialogue.turns) == 2 * len(actions) + 1
        assert dialogue.terminated == (actions[-1].reward == 0)
        assert [maze.parse(turn.text) for turn in actions] == walks.action[walk][walks.valid[walk]].tolist()
        assert dialogue.turns[2].text == maze.see(walks.next_state[walk, 0])


# ---- played in words ------------------------------------------------------------------------------------------------


def careful(dialogues: list[Dialogue]) -> list[str]:
    """The first word that agrees with all that it was told, in each game."""
    guesses = []
    for one in dialogues:
        history = [
            (guess.text[::2].strip(), answer.text[::2].strip())
            for guess, answer in zip(one.turns[1::2], one.turns[2::2], strict=True)
        ]
        agree = [word for word in WORDS if all(colours(guess, word) == answer for guess, answer in history)]
        guesses.append(" ".join(agree[0]))
    return guesses


def test_wordle_is_played_until_the_word_is_found(rng: np.random.Generator) -> None:
    played = play(wordle.game(wordle.make(WORDS)), careful, 60, rng)
    assert {len(one.turns) for one in played} >= {3, 5}  # some are over before others
    for one in played:
        *before, last = [turn for turn in one.turns if turn.is_action]
        assert one.terminated and one.turns[0] == Turn("Wordle:\n")
        assert one.turns[-1] == Turn("g g g g g\n") and last.reward == 0
        assert all(turn.reward == -1 for turn in before) and one.returned == -len(before)


def test_wordle_by_who_knows_no_word(rng: np.random.Generator) -> None:
    game = wordle.game(wordle.make(WORDS), bad_word=-10.0)
    played = play(game, lambda dialogues: ["hello"] * len(dialogues), 2, rng)
    assert played == [Dialogue((Turn("Wordle:\n"), *(Turn("hello", True, -10.0), Turn("\n")) * 6))] * 2


def test_the_maze_is_walked_by_what_is_seen(rng: np.random.Generator) -> None:
    table = clone(maze.logged(rng, published=True)).argmax(1)

    def cell(turn: Turn) -> int:
        return maze.CELLS.index(tuple(map(int, turn.text.split()[:2])))

    walks = play(
        maze.game(), lambda walks: [maze.ACTIONS[table[cell(one.turns[-1])]] for one in walks], 200, rng
    )
    starts = np.array([cell(one.turns[0]) for one in walks])
    assert set(starts) == set(STARTS)
    np.testing.assert_array_equal(
        [one.returned for one in walks], maze.returns(lambda state: table[state], starts)
    )
    assert all(one.terminated and cell(one.turns[-1]) == maze.GOAL for one in walks)
    assert maze.game().step(np.array([maze.GOAL]), ["up"], rng)[3].all()  # what is over stays so
    (stuck,) = play(maze.game(), lambda walks: ["left\n"] * len(walks), 1, rng)
    assert (len(stuck.turns), stuck.returned, stuck.terminated) == (201, -100, False)


def test_games_log_what_their_data_policies_do() -> None:
    env = wordle.make(WORDS)
    for game, again in (
        (wordle.game(env), lambda rng: wordle.dialogue(env, wordle.play(env, wordle.logged, 3, rng), 2)),
        (maze.game(), lambda rng: maze.dialogue(maze.logged(rng, 3), 2)),
    ):
        assert game.logged is not None
        dialogues = game.logged(3, np.random.default_rng(5))
        assert len(dialogues) == 3 and dialogues[2] == again(np.random.default_rng(5))
        assert all(turn.text.endswith(game.end) for turn in dialogues[2].turns if turn.is_action)


class Judge:
    """In place of a pool: passes what says so, and remembers what it was given."""

    def __init__(self, failing: str = "") -> None:
        self.pairs: list[tuple[Problem, str]] = []
        self._failing = failing  # names of problems, of one letter

    def failing(self, problems: Any) -> dict[Problem, str]:
        return {problem: "TIMEOUT" for problem in problems if problem.name in self._failing}

    def run(self, pairs: Any) -> list[Verdict]:
        pairs = list(pairs)
        self.pairs += pairs
        return [Verdict.PASSED if "right" in program else Verdict.FAILED for _, program in pairs]


def test_programs_are_judged_and_paid_on_their_last_token(rng: np.random.Generator) -> None:
    tasks = [Problem(name, f"# {name}\n", "assert f()", ("f",), "") for name in "abc"]
    pool = Judge()
    played = play(
        programs.game(pool, tasks),
        lambda all_: ["right" if "b" in one.turns[0].text else "" for one in all_],
        6,
        rng,
    )
    assert sorted(one.turns[0].text for one in played) == sorted(2 * [task.prompt for task in tasks])
    assert all(program == task.prompt + "right" * (task.name == "b") for task, program in pool.pairs)
    for one in played:
        right = "b" in one.turns[0].text
        assert one.terminated and one.turns[1:] == (Turn("right" * right, True, 1.0 if right else -0.3),)
    verdicts, rewards = programs.step(
        pool, tasks[:2], ["x", "y"], lambda task, text: text + "right" * (text == "y")
    )
    assert verdicts == [Verdict.FAILED, Verdict.PASSED] and rewards.tolist() == [-0.3, 1.0]
    cut = programs.until(["\ndef", "\nif"])
    for completion, judged in (("a\n if\nif x\ndef", "a\n if"), ("def f", "def f"), ("", "")):
        assert cut(tasks[0], completion) == tasks[0].prompt + judged == cut(tasks[0], judged)
    dialogue = programs.dialogue(tasks[0], "x", Verdict.COMPILE_ERROR)
    assert dialogue == Dialogue((Turn("# a\n"), Turn("x", True, -1.0)), terminated=True, imitate=0.0)
    assert programs.dialogue(tasks[0], "x", Verdict.PASSED).imitate == 1


def test_problems_that_judge_nobody_are_left_out_when_the_environment_is_made(
    rng: np.random.Generator,
) -> None:
    """Not in the middle of a training, where each play of them would end it."""
    tasks = [Problem(name, f"# {name}\n", "assert f()", ("f",), "") for name in "abc"]
    with pytest.warns(
        UserWarning, match=r"1 of 3 problems are played; .* here: 'a' \(TIMEOUT\), 'c' \(TIMEOUT\)"
    ):
        game = programs.game(Judge(failing="ac"), tasks)
    played = play(game, lambda all_: ["right"] * len(all_), 4, rng)
    assert {one.turns[0].text for one in played} == {"# b\n"}
    with pytest.raises(
        ValueError, match=r"of 3 problems none has a reference that passes .* Raise the limits"
    ):
        programs.game(Judge(failing="abc"), tasks)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
