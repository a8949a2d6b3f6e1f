"""Many copies of one environment, in a few worker processes or in this one.

A worker is a fresh Python that is told a name and a number of copies. It never runs the caller's main
module (as ``multiprocessing`` would), so it works from a notebook or an unguarded script, starts in the time
that the simulator takes, and holds no JAX; and it is never forked, because JAX is multi-threaded. It ends
when the pipe to its parent closes, however the parent ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np

from rl import nest
from rl.envs import registry
from rl.envs import snapshot as snapshots
from rl.machine import usable_cores

if TYPE_CHECKING:
    from rl.types import Spec


class WorkerDied(RuntimeError):
    """A process that holds environments ended by itself: it was killed, ran out of memory or crashed."""


class Step(NamedTuple):
    """One step of ``N`` environments; rows of environments that were not stepped hold 0 and False."""

    observation: Any  # [N, *observation], an array or a nested dict of arrays
    reward: np.ndarray  # [N] float64
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    # [N] float64, as the environment's info reports it (`rl.envs.make`); NaN where it does not
    success: np.ndarray


class Vector:
    """``count`` copies of an environment, reset and stepped together. Made by `vector`.

    Nothing resets by itself: the caller says which copies to reset and which to step. After any error,
    Ctrl-C included, the copies are closed, since some may have stepped and others not.
    """

    spec: Spec

    def __init__(self, name: str, count: int, processes: int):
        from rl.types import Spec

        self.count = count
        self._parts: list[_Here | _Worker] = []
        self._death: WorkerDied | None = None
        self._finalizer = weakref.finalize(self, _close, self._parts)
        shares = np.array_split(np.arange(count), max(processes, 1))
        self._slices = [slice(share[0], share[-1] + 1) for share in shares]
        host = _Worker if processes else _Here
        try:
            self._parts.extend(host(name, len(share)) for share in shares)
        except BaseException:
            self.close()
            raise
        self.spec = Spec(*self._everywhere("describe")[0])

    def reset(
        self, seeds: Sequence[int | None], options: Sequence[Mapping[str, Any] | None] | None = None
    ) -> Any:
        """Start new episodes.

        Args:
            seeds: [count] integers in [0, 2**32), None for copies to leave as they are.
            options: [count] what each copy's own ``reset`` takes as options; None for none.

        Returns:
            [count, *observation], for copies left alone their latest one, which `restore` does not bring back.
        """
        return nest.concatenate(*self._everywhere("reset", seeds, options or [None] * self.count))

    def step(self, actions: np.ndarray, active: np.ndarray | None = None) -> Step:
        """Take ``actions`` [count, ...] in the copies where ``active`` [count] bool holds, by default all."""
        if active is None:
            active = np.ones(self.count, bool)
        return Step(*map(nest.concatenate, *self._everywhere("step", actions, active)))

    def snapshot(self) -> list[snapshots.Snapshot | str]:
        """The whole state of every copy, or why it cannot be had (see `rl.envs.snapshot`)."""
        return [copy for part in self._everywhere("snapshot") for copy in part]

    def render(self, which: np.ndarray, goal: bool = False) -> list[np.ndarray | str | None]:
        """Pictures [H, W, 3] uint8 of the copies ``which`` [count] bool, or why there is none; None of the others.

        Args:
            which: copies.
            goal: show their goals instead (`rl.envs.goals`), of which they were asked at the reset.
        """
        return [
            picture for part in self._everywhere("render", which, [goal] * self.count) for picture in part
        ]

    def restore(self, saved: Sequence[snapshots.Snapshot | None]) -> None:
        """Bring every copy to the state in its snapshot, None for copies to leave as they are."""
        self._everywhere("restore", saved)

    def close(self) -> None:
        """Close the environments and end the workers; harmless if repeated."""
        self._finalizer()

    def __enter__(self) -> Vector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _everywhere(self, method: str, *columns: Any) -> list[Any]:
        """Run a method of `_Copies` on every part at once, each with its rows of the columns."""
        if not self._finalizer.alive:
            raise self._death or RuntimeError("these environments are closed")
        for column in columns:
            if len(column) != self.count:
                raise ValueError(f"{method} needs one row for each of {self.count} copies, got {len(column)}")
        try:
            for part, rows in zip(self._parts, self._slices, strict=True):
                part.send(method, *(column[rows] for column in columns))
            return [part.receive() for part in self._parts]
        except BaseException as error:
            self._death = error if isinstance(error, WorkerDied) else None
            self.close()
            raise


def vector(name: str, count: int, processes: int | None = None) -> Vector:
    """``count`` copies of the environment ``name`` (see `rl.envs.make`), to be closed or used in a ``with``.

    Args:
        name: an environment's name.
        count: number of copies.
        processes: worker processes to spread them over; 0 steps them in this process. By default one for
            each available core, at most ``count``.

    Raises:
        ValueError, ImportError: as `rl.envs.make`, wherever the copies live.
        RuntimeError: an environment failed, or (`WorkerDied`) a worker did.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if registry.is_functional(name):
        processes = 0  # they are JAX, which no worker holds
    if processes is None:
        processes = usable_cores()
    if processes < 0:
        raise ValueError(f"processes must be 0 (in this process) or more, got {processes}")
    return Vector(name, count, min(processes, count))


def check_finite(
    name: str, observation: Any, episode: np.ndarray, length: np.ndarray, reward: np.ndarray | None = None
) -> None:
    """Looks at what ``N`` copies of the environment ``name`` returned.

    Args:
        name: of the environment.
        observation: [N, *observation].
        episode: [N] which of its copy's, from 0.
        length: [N] steps that it has had.
        reward: [N], after a step.

    Raises:
        FloatingPointError: a number is not finite; the message says what it is, and when and where it came.
    """
    paid = {} if reward is None else {"reward": reward}
    for what, values in {**paid, **nest.named("observation", observation)}.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            copy = next(i for i, value in enumerate(values) if not np.isfinite(value).all())
            raise FloatingPointError(
                f"environment {name!r} (copy {copy}) returned the {what} {values[copy]} at step {length[copy]} of its "
                f"episode {episode[copy]}"
            )


def serve(descriptor: int, name: str, count: int) -> None:
    """The life of a worker: build the copies, then answer requests from this pipe until it closes."""
    # The end of a job may be announced to all its processes: the parent still needs the copies for its last checkpoint.
    # A handler, and not SIG_IGN, which processes that an environment starts would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    connection = Connection(descriptor)
    copies: _Copies | None = None
    with contextlib.suppress(EOFError, ConnectionError):  # the parent closed the pipe, or is gone
        while True:
            method, arguments = connection.recv()
            try:
                copies = copies or _Copies(name, count)
                connection.send((None, getattr(copies, method)(*arguments)))
            except Exception as error:
                # Why none could be built is said by `registry.make`; what goes wrong later is not foreseen.
                where = f"\n\nIn a worker:\n{traceback.format_exc()}" if copies is not None else ""
                connection.send((type(error).__name__, f"{error}{where}"))
    if copies is not None:
        copies.close()


class _Copies:
    """Copies of an environment that are stepped one after another."""

    def __init__(self, name: str, count: int):
        self._name = name
        self._envs = [registry.make(name) for _ in range(count)]
        self._observation = nest.map_structure(
            lambda box: np.zeros((count, *box.shape), box.dtype), self._envs[0].observation_space
        )

    def describe(self) -> tuple[Any, int, bool]:
        return registry.describe(self._envs[0])

    def reset(self, seeds: Sequence[int | None], options: Sequence[Mapping[str, Any] | None]) -> Any:
        for i, (seed, option) in enumerate(zip(seeds, options, strict=True)):
            if seed is not None:
                self._hold(
                    i,
                    self._envs[i].reset(seed=int(seed), options=None if option is None else dict(option))[0],
                )
        return self._observation

    def step(self, actions: np.ndarray, active: np.ndarray) -> tuple[Any, ...]:
        count = len(self._envs)
        reward, success = np.zeros(count), np.full(count, np.nan)
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        for i in np.flatnonzero(active):
            earned: Any
            observation, earned, terminated[i], truncated[i], info = self._envs[i].step(actions[i])
            reward[i] = self._number("returned a reward", earned)
            self._hold(int(i), observation)
            reported = info.get("success", info.get("is_success", np.nan))
            success[i] = self._number("reported a success", reported)
            if not (np.isnan(success[i]) or 0 <= success[i] <= 1):
                raise ValueError(
                    f"environment {self._name!r} reported a success of {success[i]:g}: it must lie between 0 and 1 (a "
                    "count or a distance belongs under another name in info)"
                )
        return self._observation, reward, terminated, truncated, success

    def snapshot(self) -> list[snapshots.Snapshot | str]:
        return [_snapshot(env) for env in self._envs]

    def render(self, which: np.ndarray, goal: Sequence[bool]) -> list[np.ndarray | str | None]:
        return [
            _picture(env, of_goal) if chosen else None
            for env, chosen, of_goal in zip(self._envs, which, goal, strict=True)
        ]

    def restore(self, saved: Sequence[snapshots.Snapshot | None]) -> None:
        for env, snapshot in zip(self._envs, saved, strict=True):
            if snapshot is not None:
                snapshots.put(env, snapshot)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _number(self, what: str, value: Any) -> Any:
        if np.ndim(value):
            raise ValueError(
                f"environment {self._name!r} {what} of shape {np.shape(value)}: it must be a number"
            )
        return value

    def _hold(self, i: int, observation: Any) -> None:
        for rows, row in zip(nest.leaves(self._observation), nest.leaves(observation), strict=True):
            rows[i] = row


class _Here:
    """Copies in this process, behind the interface of `_Worker`."""

    def __init__(self, name: str, count: int):
        self._copies = _Copies(name, count)
        self._reply: Any = None

    def send(self, method: str, *arguments: Any) -> None:
        self._reply = getattr(self._copies, method)(*arguments)

    def receive(self) -> Any:
        return self._reply

    def close(self) -> None:
        self._copies.close()


class _Worker:
    """Copies in a process of their own, which builds them at the first request."""

    def __init__(self, name: str, count: int):
        self._connection, theirs = multiprocessing.Pipe()
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from rl.envs import workers; workers.serve({descriptor}, {name!r}, {count})",
            ],
            pass_fds=[descriptor],
            process_group=0,  # Ctrl-C is the parent's to handle
            # One thread each: the cores are taken by the other workers and by the policy.
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": _import_path()},
        )
        theirs.close()

    def send(self, method: str, *arguments: Any) -> None:
        try:
            self._connection.send((method, arguments))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def receive(self) -> Any:
        try:
            error, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if error is None:
            return value
        known = {kind.__name__: kind for kind in (ImportError, TypeError, ValueError)}
        raise known.get(error, RuntimeError)(value)

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # stuck inside a simulator
            self._process.kill()
            self._process.wait()

    def _death(self) -> WorkerDied:
        code = self._process.wait()
        how = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        hint = (
            "; SIGKILL often means that memory ran out: use fewer copies, or run less at once"
            if code == -signal.SIGKILL
            else ""
        )
        return WorkerDied(f"an environment worker (process {self._process.pid}) died: {how}{hint}")


def _snapshot(env: gymnasium.Env) -> snapshots.Snapshot | str:
    try:
        return snapshots.take(env)
    except snapshots.NoSnapshot as reason:
        return str(reason)


def _picture(env: gymnasium.Env, of_goal: bool) -> np.ndarray | str:
    try:
        if env.render_mode is None and "rgb_array" in env.metadata.get("render_modes", ()):
            # Those who only act made it without: gymnasium's environments look at it when they render.
            env.unwrapped.render_mode = "rgb_array"
        picture = np.asarray(env.get_wrapper_attr("goal_picture") if of_goal else env.render())
    except Exception as error:  # every renderer fails in its own way
        return repr(error)
    if picture.ndim != 3 or picture.shape[-1] not in (3, 4) or picture.dtype != np.uint8:
        return f"render() gives no picture [H, W, 3] of uint8 but {picture.dtype} {picture.shape}"
    return picture


def _close(parts: list[_Here | _Worker]) -> None:
    for part in parts:
        part.close()


def _import_path() -> str:
    """This process's import path, so that a worker finds whatever its parent finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
