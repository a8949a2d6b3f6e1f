"""Scripted pushes of cubes, for HECRL's PPP-Cube (push, pick, place)."""

from __future__ import annotations

from typing import Any

import numpy as np
from ogbench.manipspace.oracles.markov.markov_oracle import MarkovOracle

PUSH_STEPS = 10  # of a push, at most
_ON_TABLE = 0.03  # metres above it is the centre of a cube that lies on another
_BEHIND = 0.07  # metres from the cube's centre to where a push starts
_ABOVE, _LOW = 0.10, 0.02  # metres: heights at which the gripper travels and pushes
_NEAR = 0.02  # metres from where the gripper is meant to be
_GAIN, _YAW_GAIN = 5, 3  # those of OGBench's oracles
_MAX_STEPS = 50  # of a subtask: another cube may be where the gripper has to go down


class CubePushOracle(MarkovOracle):
    """A closed gripper goes behind a cube, down, and pushes it straight toward its target for a few steps.

    Its interface is that of OGBench's oracles: ``reset`` starts a subtask, ``select_action`` gives an action [5] in
    [-1, 1], and ``done`` says that the subtask is over, whether or not the cube has arrived.
    """

    @staticmethod
    def possible(info: dict[str, Any]) -> bool:
        """Whether the target block and its target both lie on the table, not on another block."""
        return max(position[2] for position in _positions(info)) < _ON_TABLE

    def reset(self, ob: np.ndarray, info: dict[str, Any]) -> None:
        """Starts a push of the target block."""
        self._done = False
        self._phase = 0  # 0: above the start, 1: down, 2: push, 3: up
        self._step = self._pushed = 0
        block, target = _positions(info)
        way = (target - block)[:2]
        self._direction = way / max(float(np.linalg.norm(way)), 1e-6)

    def select_action(self, ob: np.ndarray, info: dict[str, Any]) -> np.ndarray:
        """The next action."""
        effector, yaw = info["proprio/effector_pos"], info["proprio/effector_yaw"][0]
        block, target = _positions(info)
        behind = block[:2] - _BEHIND * self._direction
        left = float(np.dot((target - block)[:2], self._direction))  # of the way, in metres
        if self._phase == 0 and np.linalg.norm(behind - effector[:2]) < _NEAR:
            self._phase = 1
        if self._phase == 1 and effector[2] < _LOW + _NEAR:
            self._phase = 2
        if self._phase == 2 and (self._pushed == PUSH_STEPS or left < _NEAR / 2):
            self._phase = 3
        self._pushed += self._phase == 2
        self._step += 1
        self._done = self._step == _MAX_STEPS or (self._phase == 3 and effector[2] > _ABOVE - _NEAR)
        goal = {
            0: np.append(behind, _ABOVE),
            1: np.append(behind, _LOW),
            2: np.append(effector[:2] + min(left, 0.1) * self._direction, _LOW),
            3: np.append(effector[:2], 2 * _ABOVE),
        }[self._phase]
        across = self.shortest_yaw(yaw, np.arctan2(self._direction[1], self._direction[0]))
        move = _GAIN * self.shape_diff(goal - effector)
        return np.clip([*move, _YAW_GAIN * (across - yaw), 1.0], -1, 1)


def _positions(info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Where the block is that the subtask is about, and where it is to be, [3] each."""
    block = info["privileged/target_block"]
    return info[f"privileged/block_{block}_pos"], info["privileged/target_block_pos"]
