"""Environments that never end: where an episode is over the next one starts, from a seed known in advance.

What an agent that learns while acting steps through. It knows no agent and no replay, and imports no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rl.envs import workers


class Experience(NamedTuple):
    """One step of ``N`` environments. An observation is an array or a nested dict of arrays."""

    next_observation: Any  # [N, *observation] where the actions led, also where the episode ended there
    reward: np.ndarray  # [N] float64
    terminated: np.ndarray  # [N] bool; an episode that ended by a time limit has not
    observation: Any  # [N, *observation] what is seen now: the same, or the first of a new episode
    first: np.ndarray  # [N] bool, a new episode started
    length: np.ndarray  # [N] int64, steps that the episode has had, this one included
    success: np.ndarray  # [N] float64, the highest info["success"] of the episode so far; NaN: not reported
    final_success: np.ndarray  # [N] float64, that of this step


class Stream:
    """``N`` copies of an environment in endless episodes.

    Episode ``e`` of copy ``i`` starts from a seed that depends on ``seeds[i]`` and ``e`` alone.
    """

    def __init__(self, name: str, seeds: Sequence[tuple[int, ...]], processes: int | None = None):
        """Builds the copies; ``observation`` [N, *observation] is then the first of each.

        Args:
            name: of the environment.
            seeds: [N] whole numbers that tell the copies apart.
            processes: as in `rl.envs.vector`.

        Raises:
            Exception: as `rl.envs.vector`.
        """
        self._name, self._seeds, self._processes = name, seeds, processes
        self._episode = np.zeros(len(seeds), np.int64)  # number of the next one of each copy
        self.finished: list[tuple[int, float, int]] = []  # (copy, return, length) of episodes that are over
        self._open()
        self.spec = self._vector.spec
        self.observation = self._begin(np.ones(len(seeds), bool))

    def step(self, actions: np.ndarray) -> Experience:
        """Takes ``actions`` [N, ...].

        Raises:
            FloatingPointError: an environment returned a reward or an observation that is not finite.
            rl.envs.WorkerDied: a process with environments is gone; `restart` gets another one.
            RuntimeError: an environment failed.
        """
        step = self._vector.step(actions)
        workers.check_finite(self._name, step.observation, self._episode - 1, self._length + 1, step.reward)
        self._return += step.reward
        self._length += 1
        np.fmax(self._success, step.success, out=self._success)  # fmax: NaN is no report
        over = step.terminated | step.truncated
        self.observation, length, success = step.observation, self._length.copy(), self._success.copy()
        if over.any():
            self.finished += [
                (int(i), float(self._return[i]), int(self._length[i])) for i in np.flatnonzero(over)
            ]
            self.observation = self._begin(over)
        return Experience(
            next_observation=step.observation,
            reward=step.reward,
            terminated=step.terminated,
            observation=self.observation,
            first=over,
            length=length,
            success=success,
            final_success=step.success,
        )

    def restart(self) -> Any:
        """Builds all copies again and starts the next episode of each; returns the first observations."""
        self._vector.close()
        self._open()
        self.observation = self._begin(np.ones(len(self._seeds), bool))
        return self.observation

    def snapshot(self) -> dict[str, Any]:
        """Where everything is, as JSON; ``reason`` says why if the environments cannot be put back there."""
        copies = self._vector.snapshot()
        reason = next((copy for copy in copies if isinstance(copy, str)), "")
        return self.lost(reason) if reason else self._where(copies, "")

    def lost(self, reason: str = "the environments failed") -> dict[str, Any]:
        """A snapshot from which new episodes start."""
        return self._where([], reason)

    def restore(self, snapshot: dict[str, Any]) -> bool:
        """Goes on from a `snapshot`; False where new episodes had to start, as ``observation`` then shows.

        A snapshot holds no observation: whoever takes one keeps the last that was seen, and acts on it after this.
        """
        self._episode = np.asarray(snapshot["episode"], np.int64)
        if not snapshot["copies"]:
            self.observation = self._begin(np.ones(len(self._seeds), bool))
            return False
        self._vector.restore(snapshot["copies"])
        self._return = np.asarray(snapshot["return"], np.float64)
        self._length = np.asarray(snapshot["length"], np.int64)
        self._success = np.asarray(snapshot["success"], np.float64)
        return True

    def close(self) -> None:
        """Closes the environments and ends their workers."""
        self._vector.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _where(self, copies: list[Any], reason: str) -> dict[str, Any]:
        return {
            "copies": copies,
            "reason": reason,
            "episode": self._episode.tolist(),
            "return": self._return.tolist(),
            "length": self._length.tolist(),
            "success": self._success.tolist(),
        }

    def _open(self) -> None:
        count = len(self._seeds)
        self._vector = workers.vector(self._name, count, self._processes)
        self._return, self._length = np.zeros(count), np.zeros(count, np.int64)
        self._success = np.full(count, np.nan)

    def _begin(self, which: np.ndarray) -> Any:
        """The next episode of the copies in ``which`` [N] bool; everyone's observation [N, *observation]."""
        seeds = [
            int(np.random.SeedSequence((*seed, int(episode))).generate_state(1)[0]) if begins else None
            for seed, episode, begins in zip(self._seeds, self._episode, which, strict=True)
        ]
        self._episode += which
        self._return[which], self._length[which], self._success[which] = 0.0, 0, np.nan
        observation = self._vector.reset(seeds)
        workers.check_finite(self._name, observation, self._episode - 1, self._length)
        return observation
