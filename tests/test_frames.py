"""rl.replay.frames against observations that were stacked while the episode was played."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import buffers
from rl.replay import frames, ring

DEPTH, GAMMA = 3, 0.9


def look(stack: np.ndarray, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
    """What a player sees after a frame [N, H, W, C]: [N, H, W, DEPTH * C]."""
    before = np.where(first[:, None, None, None], 0, stack)
    return np.concatenate([before[..., frame.shape[-1] :], frame], -1).astype(np.uint8)


class Game:
    """Frames of random numbers, stacked as a player sees them, in a ring and in a list."""

    def __init__(self, capacity: int, environments: int, times: int, longest: int = 8, channels: int = 1):
        rng = np.random.default_rng(0)
        self.environments, self.steps = environments, []
        blank = np.zeros((2, 2, DEPTH * channels), np.uint8)
        row = ring.Row(blank, np.zeros(2, np.float32), np.float32(0), np.float32(0), blank, np.bool_(False))
        self.memory = ring.empty(frames.compress(row, DEPTH), capacity)
        insert = jax.jit(ring.insert)
        stack, first = np.zeros((environments, 2, 2, DEPTH * channels), np.uint8), np.ones(environments, bool)
        left, episode = rng.integers(1, longest, environments), 1000 * np.arange(environments)

        def frame() -> np.ndarray:
            return rng.integers(1, 256, (environments, 2, 2, channels)).astype(np.uint8)

        stack = look(stack, frame(), first)
        for time in range(times):
            left = left - 1
            terminated, over = (left == 0) & (rng.random(environments) < 0.5), left == 0
            action, reward = (
                rng.normal(size=(environments, 2)).astype(np.float32),
                rng.normal(size=environments).astype(np.float32),
            )
            discount, shown = np.float32(~terminated), frame()
            following = look(stack, shown, np.zeros(environments, bool))
            block = ring.Row(stack, action, reward, discount, following, first)
            self.memory = insert(self.memory, frames.compress(block, DEPTH))
            for e in range(environments):
                number = time * environments + e
                self.steps.append(
                    {
                        **{name: np.asarray(value[e]) for name, value in block._asdict().items()},
                        "environment": e,
                        "time": time,
                        "episode": int(episode[e]),
                        "slot": number % capacity,
                        "cut": bool(over[e] and not terminated[e]),
                    }
                )
            episode, first = episode + over, over
            left = np.where(over, rng.integers(1, longest, environments), left)
            stack = np.where(over[:, None, None, None], look(stack, frame(), over), following)
        self.steps = self.steps[-capacity:]

    def later(self, step: dict[str, Any], ahead: int) -> dict[str, Any] | None:
        """The step ``ahead`` steps later (or earlier) in the same episode."""
        place = [(s["episode"], s["time"]) for s in self.steps]
        wanted = (step["episode"], step["time"] + ahead)
        return self.steps[place.index(wanted)] if wanted in place else None


def expected(game: Game, step: dict[str, Any], n: int) -> dict[str, Any]:
    """What an n-step transition from ``step`` must be, with observations that were really seen."""
    if step["cut"]:
        step = game.later(step, -1) or step
    chain = [s for s in (game.later(step, k) for k in range(n)) if s is not None]
    if chain[-1]["cut"] and len(chain) > 1:
        chain = chain[:-1]
    alone = chain[-1]["cut"]  # an episode that was cut after its only step
    return {
        "observation": step["observation"],
        "action": step["action"],
        "reward": sum(GAMMA**k * s["reward"] for k, s in enumerate(chain)),
        "discount": 0.0 if alone else GAMMA ** (len(chain) - 1) * chain[-1]["discount"],
        "next_observation": chain[-1]["next_observation"],
    }


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("capacity", "environments", "times", "channels"),
    [(60, 1, 50, 1), (40, 1, 120, 3), (41, 2, 60, 1), (42, 2, 70, 3)],
)
def test_stacks_are_those_that_were_seen(
    capacity: int, environments: int, times: int, channels: int, n: int
) -> None:
    game = Game(capacity, environments, times, channels=channels)
    slots = np.unique(np.asarray(frames.draw(game.memory, jax.random.key(0), 2000, DEPTH, n, environments)))
    transitions = jax.jit(frames.transitions, static_argnums=(2, 3, 5))(
        game.memory, jnp.asarray(slots), DEPTH, n, GAMMA, environments
    )
    by_slot = {step["slot"]: step for step in game.steps}
    drawn = [by_slot[int(slot)] for slot in slots]
    # All are drawn but those without a whole stack or without what follows.
    assert len(drawn) == len(game.steps) - environments * (DEPTH + n)
    for i, step in enumerate(drawn):
        want = expected(game, step, n)
        for name, value in want.items():
            if name == "next_observation" and want["discount"] == 0:
                continue  # no backup looks at it
            np.testing.assert_allclose(
                getattr(transitions, name)[i], value, rtol=1e-5, atol=1e-6, err_msg=f"{name} {step}"
            )
    assert transitions.observation.dtype == jnp.uint8


@pytest.mark.slow
def test_the_next_action_is_the_one_taken_there() -> None:
    game = Game(60, 1, 50)
    slots = frames.draw(game.memory, jax.random.key(0), 200, DEPTH)
    transitions = frames.transitions(game.memory, slots, DEPTH)
    by_slot = {step["slot"]: step for step in game.steps}
    for i, slot in enumerate(np.asarray(slots)):
        step = by_slot[int(slot)]
        step = (game.later(step, -1) or step) if step["cut"] else step
        after = game.later(step, 1)
        assert bool(transitions.has_next_action[i]) == (after is not None)
        np.testing.assert_array_equal(transitions.next_action[i], (after or step)["action"])


def test_the_view_of_an_online_run_reads_as_many_environments_as_it_has() -> None:
    """Which stacks those are is tested above; here, that the view passes on all that it is told."""
    memory, key = Game(41, 2, 60).memory, jax.random.key(0)
    view = buffers.stacked_frames(DEPTH, 3, GAMMA, environments=2)

    @jax.jit
    def read() -> tuple[Any, Any]:
        slots, same = view.draw(memory, key, 50), frames.draw(memory, key, 50, DEPTH, 3, 2)
        both = view.transitions(memory, slots, key), frames.transitions(memory, same, DEPTH, 3, GAMMA, 2)
        return (slots, both[0]), (same, both[1])

    jax.tree.map(np.testing.assert_array_equal, *read())
    assert (view.lookahead, view.lookback) == (2 * 3, 2 * DEPTH)


@pytest.mark.parametrize(("depth", "channels"), [(4, 1), (3, 3)])
def test_a_million_frames_take_seven_gigabytes_for_each_channel(depth: int, channels: int) -> None:
    blank = jax.ShapeDtypeStruct((84, 84, depth * channels), jnp.uint8)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    row = ring.Row(
        blank, jax.ShapeDtypeStruct((), jnp.int32), number, number, blank, jax.ShapeDtypeStruct((), bool)
    )
    compressed = jax.eval_shape(lambda row: frames.compress(row, depth), row)
    memory = jax.eval_shape(lambda: ring.empty(compressed, 1_000_000))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(memory.rows))
    assert size == 1_000_000 * (84 * 84 * channels + 3 * 4 + 1)
    with pytest.raises(ValueError, match=r"\(84, 84, \d\) are not stacks of 5 frames"):
        frames.compress(row, 5)
