"""Learning while acting where the environment is JAX, too (`rl.envs.functional`): acting and learning in one program.

What a step does, and in which order, is that of `rl.online`, whose parts these are: the environments move, what came
of it is remembered, updates follow where they are due, the next action is chosen. Here many such steps are one loop on
the device, with which the host exchanges nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from rl import acting, buffers, keys, online, train
from rl.envs.world import Outcome, World
from rl.evaluate import LONG_EPISODE
from rl.interaction import Progress
from rl.replay import images, transform
from rl.replay.transform import Transform
from rl.types import Actor, Array, Key, Learner, State

_CALL = 1_000  # steps of every environment, or updates, in one call, after which it can be stopped


class Episodes(NamedTuple):
    """What the environments paid: ``S`` seeds with ``N`` each, their episodes now and those that are over."""

    running: Any  # [2, S, N]: return, as the environment pays it, and length so far
    finished: Any  # [2, S]: sums over the episodes that are over
    count: Any  # [S]: how many these are
    finite: Any  # [] bool: whether all rewards and observations so far were


class Carry(NamedTuple):
    """Everything that one call hands to the next."""

    learning: online.Carry
    world: Any  # [S, N, ...], states of the environments
    episodes: Episodes


class Trainer:
    """Environments and the learners in them, with the members of `rl.interaction.Trainer` that a run needs.

    Args:
      world: the environment.
      learner: must know how to explore (`rl.acting.explorer`).
      replay: its memory; says how many environments ``N`` each seed has.
      run_keys: [S], one for each seed (`rl.keys.seeds`).
      rhythm: how many updates are made after every how many steps of the ``N`` environments together.
      learning_starts: steps of each seed before the first update.
      random: steps of each seed whose actions are drawn uniformly.
      preprocessing: how learners see observations and rewards.
      logged: data that ``replay`` mixes into batches, as learners see them.

    Raises:
      ValueError: ``logged`` are other returns than ``replay`` reads (`rl.buffers.check_logged`).
    """

    def __init__(
        self,
        world: World,
        learner: Learner,
        replay: buffers.Replay,
        run_keys: Key,
        *,
        rhythm: tuple[int, int] = (1, 1),
        learning_starts: int,
        random: int,
        preprocessing: Transform = Transform(),
        logged: Any = None,
    ):
        keys.count(run_keys)
        buffers.check_logged(replay.view, logged)
        self.step, self.evaluated, self.deaths, self.whole = 0, 0, 0, True
        self._view, self._learning = replay.view, False  # whether updates have begun
        self._environments, self._logged = replay.view.environments, images.on_device(logged)
        self._boundaries = learning_starts, random
        self._most = max(1, _CALL * rhythm[1] // max(rhythm))  # steps of each environment in one call
        begin, steps = _program(world, learner, replay, run_keys, rhythm, preprocessing)
        init = functools.partial(begin, random=random > 0)
        self._init = jax.jit(init)
        self._run = jax.jit(steps, static_argnums=(3, 4), donate_argnums=0)
        self._carry: Carry = jax.eval_shape(init, None)  # until `start` or `resume`

    @property
    def carry(self) -> online.Carry:
        """The learners' part of everything, until the next `advance`, `start` or `resume`, which delete its arrays."""
        return self._carry.learning

    def start(self, state: State | None = None) -> None:
        """Begins, with learners in ``state`` if it is given."""
        self._carry = self._init(state)

    def advance(self, until: int, bar: Progress | None = None, stopping: Sequence[int] = ()) -> None:
        """Steps and learns until ``step`` is ``until``, or until asked to stop.

        Args:
          until: steps of each seed since the start.
          bar: is told of every call.
          stopping: ends this as soon as it has an entry.

        Raises:
          FloatingPointError: the environment returned a reward or an observation that is not finite.
          RuntimeError: nothing began.
          train.Diverged: the learners did.
          ValueError: episodes are too short for chunks of actions (`buffers.check_chunks`).
        """
        if isinstance(self.carry.time, jax.ShapeDtypeStruct):
            raise RuntimeError("the trainer has no learners yet: call start(None), or resume, before advance")
        while self.step < until and not stopping:
            learning, acting_by_policy = (self.step + self._environments >= x for x in self._boundaries)
            count = min(self._same(until), self._most)
            if learning and not self._learning and self._view.chunk > 1:
                count = 1  # what is learned from must be chunks from the first update on: see below
            self.whole = False  # what was there is being overwritten
            self._carry = self._run(self._carry, self._logged, count, learning, not acting_by_policy)
            self.step += count * self._environments
            if not self._carry.episodes.finite:
                raise FloatingPointError(
                    f"the environment returned a reward or an observation that is not finite, before step {self.step}"
                )
            if learning and not self._learning:
                # Before `whole`: what was learned from chunks that are refused must not be saved.
                buffers.check_chunks(self._view, self.carry.memory)
                self._learning = True
            self.whole = True
            if bar is not None:
                bar.update(count * self._environments)

    def _same(self, until: int) -> int:
        """How many steps of the environments there are until ``until``, or until learning or acting changes."""
        number = self.step // self._environments  # of those that were made
        changes = [-(-x // self._environments) - 1 for x in self._boundaries]
        ends = [until // self._environments, *(x for x in changes if x > number)]
        return max(min(ends) - number, 1)

    def check(self) -> train.Report:
        """The metrics since the last `read`. Raises `train.Diverged` if one was not finite, or an action is not."""
        return online.checked(self.carry.tally, jax.device_get(self.carry.action), self.step)

    def read(self) -> dict[str, np.ndarray]:
        """What there is to say of the time since the last call: {"train/...": [S]}. Raises `train.Diverged`."""
        report, episodes = self.check(), self._carry.episodes
        seeds = len(episodes.count)
        with np.errstate(invalid="ignore"):
            mean = np.asarray(episodes.finished) / np.asarray(episodes.count)
        self._carry = self._carry._replace(
            learning=self.carry._replace(tally=online.zero_sums(sorted(report.metrics), seeds)),
            episodes=episodes._replace(
                finished=jnp.zeros_like(episodes.finished), count=jnp.zeros_like(episodes.count)
            ),
        )
        return online.finite_metrics(report) | {"train/return": mean[0], "train/length": mean[1]}

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds; shapes, before `start`."""
        learning: Any = self.carry._replace(state=cast(Any, None))
        return {"state": self.carry.state, "loop": self._carry._replace(learning=learning)}

    def notes(self) -> dict[str, Any]:
        """What goes with it."""
        return {"evaluated": self.evaluated, "learning": self._learning}

    def resume(self, saved: Mapping[str, Any], step: int, notes: Mapping[str, Any]) -> None:
        """Goes on from what `saved` and `notes` returned at ``step``."""
        loop = saved["loop"]
        self._carry = loop._replace(learning=loop.learning._replace(state=saved["state"]))
        self.step, self.evaluated = step, notes["evaluated"]
        self._learning = notes.get("learning", False)  # notes of earlier versions do not say it


def _program(
    world: World,
    learner: Learner,
    replay: buffers.Replay,
    run_keys: Key,
    rhythm: tuple[int, int],
    preprocessing: Transform,
) -> tuple[Callable[..., Carry], Callable[..., Carry]]:
    """What a `Trainer` compiles: how a run begins, and its steps; see there for the arguments."""
    environments, (updates, period) = replay.view.environments, rhythm
    explorer = acting.resetting(acting.explorer(learner))
    act = functools.partial(online.choose_actions, world.spec, explorer, keys.of(run_keys, "act"))
    see = functools.partial(transform.observations, preprocessing)
    world_keys = keys.of(run_keys, "world")

    def begin(given: State | None, random: bool) -> Carry:
        """A run before its first step, with learners as ``given``; ``random`` says how its first actions are drawn."""
        observation, state = jax.vmap(lambda key: world.reset(_each(key, 0, environments)))(world_keys)
        observation = see(observation)
        types = jax.tree.map(lambda x: x.dtype, observation)
        learning = online.initial_carry(learner, world.spec, replay, explorer, run_keys, environments, types)
        learning = learning._replace(seen=observation, state=learning.state if given is None else given)
        learning, _ = act(learning, random)
        seeds = run_keys.shape[0]
        nothing = jnp.zeros((2, seeds, environments))
        return Carry(
            learning, state, Episodes(nothing, nothing[..., 0], jnp.zeros(seeds), _finite(observation, ()))
        )

    def stepped(outcome: Outcome) -> online.Step:
        """What came of a step, as learners see it."""
        both = jax.tree.map(lambda *x: jnp.stack(x), see(outcome.next_observation), see(outcome.observation))
        reward = transform.scaled(preprocessing, outcome.reward)
        return online.Step(both, jnp.stack([reward, 1.0 - outcome.terminated, 1.0 * outcome.first]))

    def learned(after: online.Carry, memory: Any, logged: Any, time: Array) -> online.Carry:
        """With the updates that are due after the step of number ``time``."""
        rows, priorities = replay.split(memory)

        def learn() -> tuple[online.Carry, Any]:
            return online.update_learners(replay, run_keys, after, priorities, rows, logged, updates)

        # A condition even where it always holds, of which the compiler must not know: it would read what updates draw
        # together with what is being written, from a copy of the whole memory.
        due = (time % period == 0) & (time > 0)
        improved, priorities = jax.lax.cond(due, learn, lambda: (after, priorities))
        return improved._replace(memory=replay.join(rows, priorities))

    def step(carry: Carry, logged: Any, learning: bool, random: bool) -> Carry:
        """One step of every environment, with the updates that are due after it, and the next actions."""
        before = carry.learning
        move = lambda key, state, action: world.step(_each(key, before.time, environments), state, action)
        outcome = jax.vmap(move)(world_keys, carry.world, before.action)
        memory, now, first = online.insert(
            replay, before.memory, before.seen, before.action, before.first, stepped(outcome)
        )
        after = before._replace(memory=None, seen=now, first=first)
        after = learned(after, memory, logged, before.time) if learning else after._replace(memory=memory)
        after, _ = act(after, random)
        return Carry(after, outcome.state, _counted(carry.episodes, before.action, outcome))

    def steps(carry: Carry, logged: Any, count: Array | int, learning: bool, random: bool) -> Carry:
        """``count`` steps of every environment; however many, it is one program."""
        return jax.lax.fori_loop(0, count, lambda _, carry: step(carry, logged, learning, random), carry)

    return begin, steps


def _each(key: Key, time: Array | int, environments: int) -> Key:
    """The keys [N] of all environments for one step."""
    return jax.random.split(jax.random.fold_in(key, time), environments)


def _counted(episodes: Episodes, action: Array, outcome: Outcome) -> Episodes:
    """With one step more of all [S, N] environments."""
    running = episodes.running + jnp.stack([outcome.reward, jnp.ones_like(outcome.reward)])
    given = _finite((outcome.reward, outcome.next_observation, outcome.observation), ())
    return Episodes(
        running=jnp.where(outcome.first, 0.0, running),
        finished=episodes.finished + jnp.where(outcome.first, running, 0.0).sum(-1),
        count=episodes.count + outcome.first.sum(-1),
        # What actions lead to that are not finite is the learners' fault, as their metrics say by the end of this call.
        finite=episodes.finite & (given | ~_finite(action, ())),
    )


def _finite(tree: Any, shape: tuple[int, ...]) -> Array:
    """Whether all numbers of ``tree`` are finite, for each of its rows [*shape]."""
    rows = [jnp.isfinite(x).reshape(*shape, -1).all(-1) for x in jax.tree.leaves(tree)]
    return jnp.stack(rows).all(0)


def evaluator(
    world: World, actor: Actor, episodes: int, seeds: int, base_seed: int
) -> Callable[[State, int], dict[str, np.ndarray]]:
    """A function (states of all policies, number of the evaluation) -> scores {name: [S, episodes]}.

    Scores are ``return`` and ``length``, of the first episode of each of as many copies. An episode that has not ended
    after 100,000 steps ends there, and a warning says so.

    Args:
      world: the environment.
      actor: of states [S, ...] and observations [S, episodes, ...].
      episodes: of each policy.
      seeds: policies, ``S``.
      base_seed: of all evaluations.
    """
    root = keys.of(jax.random.key(base_seed), "evaluate")

    @jax.jit
    def play(states: State, index: Array) -> tuple[Array, Array]:
        each = jax.random.split(jax.random.fold_in(root, index), seeds)
        copies = lambda time: jax.vmap(lambda key: _each(key, time, episodes))(each)
        seen, world_state = jax.vmap(world.reset)(copies(0))
        memory, ill = actor.start(states, seen), jnp.zeros((2, seeds), bool)
        start = seen, world_state, memory, jnp.zeros((3, seeds, episodes)), ill, jnp.int32(1)

        def more(now: Any) -> Array:
            return (now[-1] <= LONG_EPISODE) & (now[3][2] == 0).any()

        def step(now: Any) -> Any:
            seen, world_state, memory, (total, length, over), ill, time = now
            # Of its own number, so that no environment draws what the policy does.
            chance = jax.vmap(lambda key: jax.random.fold_in(key, 2 * LONG_EPISODE + time))(each)
            first = jnp.full(over.shape, time == 1)
            chosen, memory = actor.act(states, memory, seen, first, chance)
            # As in training (`rl.online.choose_actions`): a world is given actions within its box.
            action = chosen if world.spec.discrete else jnp.clip(chosen, -1.0, 1.0)
            outcome = jax.vmap(world.step)(copies(time), world_state, action)
            running = over == 0
            blind, lost = ((running & ~_finite(x, running.shape)).any(1) for x in (seen, chosen))
            # What came first is the cause of the other.
            ill |= jnp.stack([blind, lost & ~blind]) & ~ill.any(0)
            reward = jnp.where(running, outcome.reward, 0.0)  # after its end an episode may return anything
            scores = jnp.stack([total + reward, length + running, jnp.maximum(over, 1.0 * outcome.first)])
            return outcome.observation, outcome.state, memory, scores, ill, time + 1

        return jax.lax.while_loop(more, step, start)[3:5]

    def score(states: State, index: int) -> dict[str, np.ndarray]:
        (total, length, over), (blind, lost) = jax.device_get(
            play(acting.without_optimiser(states), jnp.int32(index))
        )
        if lost.any():
            raise FloatingPointError(
                f"policies {np.flatnonzero(lost).tolist()} (of {seeds}) returned an action that is not finite"
            )
        if blind.any() or not np.isfinite(total).all():
            what = "an observation" if blind.any() else "a reward"
            raise FloatingPointError(
                f"the environment returned {what} that is not finite, in evaluation {index}"
            )
        if cut := int((over == 0).sum()):
            warnings.warn(
                f"{cut} of {over.size} episodes were cut after {LONG_EPISODE:,} steps, and count as if they ended "
                "there: if the environment has no time limit, give it one (first of rl.envs.world.Outcome)",
                stacklevel=2,
            )
        return {"return": np.asarray(total, np.float64), "length": np.asarray(length, np.int64)}

    return score
