"""The host's side of learning while acting: environments and the learners in them, from step to step.

The environments are stepped here (`rl.envs.stream`), and what came of it goes to the compiled calls (`rl.online`).
When an environment's process dies, all are built again and start new episodes; what there is can be saved at any step
that is whole, and goes on from there to the same bits where the environments can be put back.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rl import buffers, envs, keys, nest, online, train
from rl.envs.stream import Experience, Stream
from rl.replay import images, transform
from rl.replay.transform import Transform
from rl.types import Key, Learner, State

# Whether the environment reported info["success"] at any step of the episode, or at the last one, as in evaluation
SUCCESS, FINAL_SUCCESS = "success", "final_success"


def succeeded(experience: Experience, success: str | float) -> np.ndarray:
    """The episodes [N] bool that ended with this step, and well.

    Args:
      experience: the step.
      success: `SUCCESS` or `FINAL_SUCCESS`, of what the environment reports; or the least reward of the last step, as
        the environment pays it.

    Raises:
      ValueError: the environment does not report it in one of these episodes.
    """
    over = experience.first
    if not isinstance(success, str):
        return over & (experience.reward >= success)
    reported: np.ndarray = getattr(experience, success)
    if np.isnan(reported[over]).any():
        raise ValueError(
            f'the environment does not report info["success"], of which "{success}" is made, in every episode: let it '
            "report False, too, or choose episodes by the reward of their last step, by --relabel_success=1, say "
            "(success=1.0), if it is 1 where they succeed"
        )
    return over & (reported > 0)


class Retraining(NamedTuple):
    """What learns between two steps: a model of the environment (`rl.mbpo`)."""

    due: Callable[[int], bool]  # step -> whether it does, before the next one
    # (carry, step) -> carry, metrics {name: [S]}; an error leaves the carry that it was given as it was
    run: Callable[[online.Carry, int], tuple[online.Carry, dict[str, np.ndarray]]]
    # (metrics, step): raises FloatingPointError if they are those of a model that diverged
    check: Callable[[Mapping[str, np.ndarray], int], None]


class Progress(Protocol):
    """What is told how many steps were taken: a progress bar of tqdm, for example."""

    def update(self, count: int) -> Any:
        """``count`` more steps were taken."""


class Trainer:
    """The environments and the learners in them, from step to step.

    Args:
      stream: the environments of all seeds, ``N`` of each, those of one seed after another.
      learner: must know how to explore (`rl.acting.explorer`).
      replay: its memory.
      run_keys: [S], one for each seed (`rl.keys.seeds`).
      rhythm: how many updates are made after every how many steps of the ``N`` environments together; by default one
        after each.
      learning_starts: steps of each seed before the first update; with ``retraining``, before its first run, which the
        updates follow that the next step brings.
      random: steps of each seed whose actions are drawn uniformly.
      preprocessing: how learners see observations and rewards; by default as they are.
      logged: data that ``replay`` mixes into batches, as learners see them: a `rl.replay.dataset.Dataset`, or its
        `rl.replay.chunks.Chunks`.
      success: which episodes join the demonstrations, as in `succeeded`; None for none.
      retraining: what learns between steps beside the learners, if anything does.

    Raises:
      ValueError: some do, and ``replay`` cannot relabel their steps; or ``logged`` are other returns than it reads
        (`rl.buffers.check_logged`); or seeds do not have equally many environments, or
        ``replay`` is of another number of them.
    """

    def __init__(
        self,
        stream: Stream,
        learner: Learner,
        replay: buffers.Replay,
        run_keys: Key,
        *,
        rhythm: tuple[int, int] = (1, 1),
        learning_starts: int,
        random: int,
        preprocessing: Transform = Transform(),
        logged: Any = None,
        success: str | float | None = None,
        retraining: Retraining | None = None,
    ):
        self.step, self.evaluated, self.deaths = 0, 0, 0  # evaluated: at which step, the last time
        self.whole, self._failed = True, False  # what is here can be saved; an environment failed
        buffers.check_logged(replay.view, logged)
        self._stream, self._logged = stream, images.on_device(logged)
        self._success = success
        self._preprocessing = preprocessing
        self._see = functools.partial(transform.observations, preprocessing)
        observation = self._see(stream.observation)
        rows = len(nest.leaves(observation)[0])
        self._view, self._learning = replay.view, False  # whether updates have begun
        self._seeds = keys.count(run_keys)
        if rows % self._seeds:
            raise ValueError(
                f"the stream has {rows} environments for {self._seeds} seeds: give each seed as many, say "
                f"{self._seeds * math.ceil(rows / self._seeds)} in all"
            )
        self._environments = rows // self._seeds
        types = jax.tree.map(lambda x: x.dtype, observation)
        self._loop = online.loop(learner, stream.spec, replay, run_keys, self._environments, types)
        if success is not None and self._loop.relabel is None:
            raise ValueError(
                "this replay cannot relabel episodes that succeed: make it by rl.buffers.relabelling"
            )
        self.carry = jax.eval_shape(self._loop.init)  # until `start` or `resume`
        self.action = np.zeros(self.carry.action.shape, self.carry.action.dtype)
        self.relabelled = np.zeros(self._seeds, np.int64)  # episodes that joined the demonstrations
        self.retrained, self.model_metrics = -1, dict[str, np.ndarray]()  # at which step; its metrics then
        self._retraining = retraining
        self._updates, self._period = rhythm
        self._learning_starts, self._random_steps = learning_starts + (retraining is not None), random

    def start(self, state: State | None = None) -> None:
        """Begins, with learners in ``state`` if it is given, which stays the caller's."""
        self.carry = self._loop.init()
        if state is not None:
            # A copy: the calls of the loop consume what they are given.
            self.carry = self.carry._replace(state=jax.tree.map(jnp.copy, state))
        self._begin()

    def advance(self, until: int, bar: Progress | None = None, stopping: Sequence[int] = ()) -> None:
        """Steps and learns until ``step`` is ``until``, or until asked to stop.

        Args:
          until: steps of each seed since the start.
          bar: is told of every step.
          stopping: ends this as soon as it has an entry: what `rl.train.stop_requests` yields, for example.

        Raises:
          FloatingPointError, RuntimeError: as `rl.envs.stream.Stream.step`; a model diverged; or nothing began.
          ValueError: episodes are too short for chunks of actions (`buffers.check_chunks`).
        """
        if isinstance(self.carry.time, jax.ShapeDtypeStruct):
            raise RuntimeError("the trainer has no learners yet: call start(None), or resume, before advance")
        died = -1
        while self.step < until and not stopping:
            self._retrain()
            try:
                experience = self._stream.step(self.action.reshape(-1, *self.action.shape[2:]))
                joining = self._joining(experience)
            except envs.WorkerDied as death:
                if died == self.step:  # at once again: another try would not help
                    self._failed = True
                    raise
                died, self.deaths, self._failed = self.step, self.deaths + 1, True
                print(f"\n{death}: started again, with new episodes; nothing is lost", file=sys.stderr)
                self._stream.restart()
                self._begin()
                self._failed = False
                continue
            except Exception:
                self._failed = True
                raise
            self.whole = False
            self.step += self._environments
            due = self.step % (self._environments * self._period) == 0
            learning = due and self.step >= self._learning_starts
            self.carry, action = self._loop.step(
                self.carry,
                self._step(experience),
                self._logged,
                self._updates if learning else 0,
                self._random(),
            )
            self._join(joining)
            self.action = np.asarray(action)
            if learning and not self._learning:
                # Before `whole`: what was learned from chunks that are refused must not be saved.
                buffers.check_chunks(self._view, self.carry.memory)
                self._learning = True
            self.whole = True
            if bar is not None:
                bar.update(self._environments)

    def check(self) -> train.Report:
        """The metrics since the last `read`. Raises `train.Diverged` if one was not finite, or an action is not."""
        return online.checked(self.carry.tally, self.action, self.step)

    def read(self) -> dict[str, np.ndarray]:
        """What there is to say of the time since the last call: {"train/...": [S]}, and {"model/...": [S]}.

        Raises:
          train.Diverged: a metric was not finite.
        """
        report = self.check()
        metrics = online.finite_metrics(report)
        self.carry = self.carry._replace(tally=online.zero_sums(sorted(report.metrics), self._seeds))
        finished, self._stream.finished = self._stream.finished, []
        for place, name in ((1, "return"), (2, "length")):
            values: list[list[float]] = [[] for _ in range(self._seeds)]
            for episode in finished:
                values[episode[0] // self._environments].append(episode[place])
            metrics[f"train/{name}"] = np.array([np.mean(x) if x else math.nan for x in values])
        if self._success is not None:
            metrics["train/relabelled_episodes"] = self.relabelled.astype(float)
        return metrics | {f"model/{name}": value for name, value in self.model_metrics.items()}

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds; shapes, before `start`."""
        return {"state": self.carry.state, "loop": self.carry._replace(state=None), "action": self.action}

    def notes(self) -> dict[str, Any]:
        """What goes with it; new episodes start from there if an environment failed."""
        notes = {
            "stream": self._stream.lost() if self._failed else self._snapshot(),
            "finished": self._stream.finished,
            "deaths": self.deaths,
            "evaluated": self.evaluated,
            "learning": self._learning,
            "relabelled": self.relabelled.tolist(),
        }
        if self._retraining:
            metrics = {name: value.tolist() for name, value in self.model_metrics.items()}
            notes["retraining"] = {"step": self.retrained, "metrics": metrics}
        return notes

    def _snapshot(self) -> dict[str, Any]:
        try:
            return self._stream.snapshot()
        except RuntimeError as failure:  # the environments are gone, and what the learners remember is not
            return self._stream.lost(str(failure).partition("\n")[0])

    def resume(self, saved: Mapping[str, Any], step: int, notes: Mapping[str, Any]) -> None:
        """Goes on from what `saved` and `notes` returned at ``step``."""
        self.step, self.carry = step, saved["loop"]._replace(state=saved["state"])
        self.action = saved["action"]
        self.deaths, self.evaluated = notes["deaths"], notes["evaluated"]
        self._learning = notes.get("learning", False)  # notes of earlier versions do not say it
        self.relabelled = np.array(notes["relabelled"])
        if self._retraining:
            self.retrained = notes["retraining"]["step"]
            self.model_metrics = {
                name: np.array(value) for name, value in notes["retraining"]["metrics"].items()
            }
        self._stream.finished = [tuple(episode) for episode in notes["finished"]]
        if not self._stream.restore(notes["stream"]):
            print(f"new episodes start here: {notes['stream']['reason']}", file=sys.stderr)
            self._begin()

    def _retrain(self) -> None:
        """Where that is due, and has not been done: a run that was stopped may go on from either side of it."""
        retraining = self._retraining
        if retraining is None or self.retrained == self.step or not retraining.due(self.step):
            return
        self.carry, metrics = retraining.run(self.carry, self.step)
        self.whole = False  # what diverged is not saved: a run that goes on would learn from it once more
        retraining.check(metrics, self.step)
        self.retrained, self.model_metrics, self.whole = self.step, metrics, True

    def _begin(self) -> None:
        observation = self._by_seed(self._see(self._stream.observation))
        self.carry, action = self._loop.begin(self.carry, observation, self._random())
        self.action = np.asarray(action)

    def _random(self) -> bool:
        return self.step < self._random_steps

    def _step(self, experience: Experience) -> online.Step:
        scalar = np.stack(
            [
                transform.rewards(self._preprocessing, experience.reward),
                ~experience.terminated,
                experience.first,
            ]
        )
        both = jax.tree.map(lambda *x: np.stack(x), experience.next_observation, experience.observation)
        shape = (self._seeds, self._environments)
        both = jax.tree.map(lambda x: x.reshape(2, *shape, *x.shape[2:]), self._see(both))
        return online.Step(both, scalar.reshape(3, *shape))

    def _joining(self, experience: Experience) -> np.ndarray:
        """Lengths [S, N] of the episodes that ended with this step and become demonstrations; 0 elsewhere."""
        if self._success is None:
            return np.zeros((self._seeds, self._environments), np.int32)
        lengths = np.where(succeeded(experience, self._success), experience.length, 0)
        return self._by_seed(lengths.astype(np.int32))

    def _join(self, lengths: np.ndarray) -> None:
        if lengths.any():
            assert self._loop.relabel is not None
            self.carry = self._loop.relabel(self.carry, lengths)
            self.relabelled += (lengths > 0).sum(1)

    def _by_seed(self, rows: Any) -> Any:
        """[S * N, ...] -> [S, N, ...]."""
        return jax.tree.map(lambda x: x.reshape(self._seeds, self._environments, *x.shape[1:]), rows)
