r"""Train an agent in its environment, several seeds at once, and say how good it is.

    python -m experiments.online --agent=sac --env=HalfCheetah-v5 --steps=1000000

The run folder holds config.json, metrics.jsonl, TensorBoard events, curve.png, result.json, the policy of every
evaluation under actors/ and checkpoints; the same command continues an interrupted run, to the same bits where the
environment can be put back into the middle of an episode (classic control and MuJoCo can) and with new episodes
elsewhere. ``--agent=NAME --help`` lists an agent's own hyper-parameters.

DQN on Atari games (extra: atari) by Dopamine's protocol, whose numbers then stand where no flag says otherwise. A
million steps are remembered in 7.07 GB, the frames once as uint8, stacked on the device when they are drawn:

    python -m experiments.online --agent=dqn --env=ALE/Pong-v5 --head=hl_gauss

Fine-tuning what `experiments.offline` trained, half of every batch from the log:

    python -m experiments.online --agent=iql --env=Hopper-v5 --init_from=runs/hopper-medium-v2/iql-scalar \
        --offline_data=hopper-medium-v2 --offline_ratio=0.5
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from experiments import flags, offline
from rl import acting, agents, checkpoint, data, envs, evaluate, keys, log, online, train
from rl.envs.stream import Experience, Stream
from rl.replay.dataset import Dataset
from rl.types import Learner, Spec, State
from rl.values import heads

_IDENTITY = (
    *("env", "head", "head_size", "head_low", "head_high", "seeds", "seed", "envs", "utd", "learning_starts"),
    *("replay", "batch_size", "n_step", "eval_every", "eval_episodes", "init_from", "offline_data"),
    *("offline_ratio", "priority", "priority_correction", "reward_scale", "clip_rewards"),
)
_LEFT = (*offline.LEFT, "actors")
_FRAMES = 4  # in a stacked observation
_SEEDS = 0x5EED0  # told from other uses of the run's seed by its first word


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything about a run that is not the agent's own."""

    agent: str = "sac"  # sac, td3, dqn; or, to fine-tune: iql, cql, td3_bc, sac_n, edac, or my.agent
    env: str = "HalfCheetah-v5"  # environment to learn in, by its gymnasium name
    head: str = "scalar"  # value representation: scalar, two_hot, hl_gauss, c51 or quantile
    head_size: int = 101  # outputs of the head (the scalar head has one)
    head_low: float = float("nan")  # lower end of a categorical head's support
    head_high: float = float("nan")  # upper end
    seeds: int = 1  # seeds trained at once, each with its own environments and replay
    seed: int = 0  # the run's own seed: another value gives other seeds
    steps: int = 1_000_000  # environment steps of each seed
    envs: int = 1  # environments of each seed, stepped together
    env_processes: int = -1  # worker processes for them; -1: none for one environment, else one per core
    utd: float = 1.0  # updates per environment step; 0.25 is one in four steps
    learning_starts: int = 5_000  # steps with random actions, before the first update
    replay: int = 1_000_000  # steps that are remembered
    batch_size: int = 256  # transitions per update
    n_step: int = 1  # steps in each transition
    priority: float = 0.0  # exponent of a step's loss in its chance to be drawn (dqn); 0 draws uniformly
    priority_correction: float = 0.5  # exponent of the weights that take the bias out of such draws
    reward_scale: float = 1.0  # factor on the rewards that the agent sees
    clip_rewards: bool = False  # clip them to [-1, 1]; evaluation counts the environment's own
    eval_every: int = 10_000  # steps between evaluations; log and policy are written at each
    eval_episodes: int = 10  # episodes per seed and evaluation, at least 2
    eval_processes: int = -1  # worker processes for them; -1: one per core, 0: none
    save_every: int = 100_000  # steps between checkpoints, which hold the whole replay
    init_from: str = ""  # run folder of experiments.offline or experiments.online to start from
    offline_data: str = ""  # dataset to mix in: name, minari:ID, or file
    offline_ratio: float = 0.5  # share of each batch that is drawn from it
    workdir: str = ""  # run folder; by default runs/ENV/AGENT-HEAD
    overwrite: bool = False  # start again where the folder holds a run
    tensorboard: bool = True  # write TensorBoard events
    wandb: bool = False  # log to Weights & Biases too (extra: track)


def run(settings: Settings, config: Any) -> dict[str, Any]:
    """Trains, evaluates and reports one run; returns what result.json holds.

    A run that is finished is left as it is, and what it found is returned. When an environment's process dies,
    all environments are built again and start new episodes; nothing that was collected is lost.

    Raises:
      ValueError: settings that cannot be run; the message names the flag.
      TypeError: an environment whose observations or actions agents here cannot use.
      checkpoint.CheckpointError: the run folder holds another run.
      FloatingPointError: the environment returned a reward or an observation that is not finite.
      RuntimeError: an environment failed, or its process died twice at once. Whenever an environment ends the
        run, what was collected before is in the last checkpoint, and the same command goes on with new episodes.
      train.Diverged: a metric stopped being finite.
      train.Interrupted: Ctrl-C or SIGTERM, after a checkpoint.
    """
    check(settings)
    workdir = folder(settings)
    with ExitStack() as stack:
        stream = stack.enter_context(stepper(settings))
        learner, replay, logged = parts(settings, config, stream.spec)
        trainer = Trainer(settings, stream, learner, replay, logged)
        card = {
            "agent": settings.agent,
            "settings": {name: getattr(settings, name) for name in _IDENTITY},
            "config": dataclasses.asdict(config),
        }
        save = functools.partial(trainer.save, workdir / "checkpoints", card)
        if settings.overwrite or not trainer.restore(workdir / "checkpoints", card):
            trainer.start(initial(settings, learner, stream.spec) if settings.init_from else None)
        if trainer.step >= settings.steps and (
            result := offline.finished(workdir, trainer.step, settings.steps, "steps")
        ):
            return result
        score = stack.enter_context(scorer(settings, learner))
        if settings.overwrite:  # not before everything that can be wrong with this run has been tried
            offline.clear(workdir, _LEFT)
        record = stack.enter_context(
            log.open_run(
                workdir,
                card,
                tensorboard=settings.tensorboard,
                wandb=settings.wandb,
                resume_step=trainer.step,
            )
        )
        (workdir / "actors").mkdir(exist_ok=True)
        bar = stack.enter_context(
            log.progress(settings.steps, f"{settings.agent} {settings.env}", initial=trainer.step)
        )
        stopping = stack.enter_context(train.stop_requests())
        _learn(settings, trainer, score, record, save, bar, stopping, workdir)
        result = {
            **card,
            "steps": trainer.step,
            "updates": int(trainer.carry.state.step),
            "scores": offline.summary(workdir),
            "wall_seconds": trainer.seconds(),
            "deaths": trainer.deaths,
            **log.provenance(),
        }
        record.result(result)
    offline.draw(workdir, f"{settings.agent}, {settings.head}", settings.env, "environment steps")
    return result


def _learn(
    settings: Settings,
    trainer: Trainer,
    score: Callable[[State, int], dict[str, np.ndarray]],
    record: log.Run,
    save: Callable[..., None],
    bar: Any,
    stopping: list[int],
    workdir: Path,
) -> None:
    """From evaluation to evaluation until the end, or until asked to stop."""
    while trainer.evaluated < settings.steps:
        due = trainer.evaluated + settings.eval_every
        try:
            trainer.advance(due, bar, stopping)
            if trainer.step == due:
                scores = score(trainer.carry.state, due // settings.eval_every)
        except Exception:
            if trainer.whole:
                save()
            raise
        if trainer.step == due:
            record.write(due, trainer.read() | scores)
            export(workdir / "actors" / f"{due}.npz", trainer.carry.state)
            bar.set_postfix({"return": f"{scores['eval/return'].mean():.4g}"}, refresh=False)
            trainer.evaluated = due
            if due % settings.save_every == 0 or due == settings.steps:
                save()
        if stopping and trainer.evaluated < settings.steps:
            save()
            raise train.Interrupted(
                f"stopped at step {trainer.step}; the same command continues from {workdir}"
            )


class Trainer:
    """The environments and the learners in them, from step to step."""

    def __init__(
        self,
        settings: Settings,
        stream: Stream,
        learner: Learner,
        replay: online.Replay,
        logged: Dataset | None,
    ):
        self.step, self.evaluated, self.deaths = 0, 0, 0  # evaluated: at which step, the last time
        self.whole, self._failed = True, False  # what is here can be saved; an environment failed
        self._settings, self._stream, self._logged = settings, stream, jax.device_put(logged)
        run_keys = keys.seeds(jax.random.key(settings.seed), settings.seeds)
        self._loop = online.loop(
            learner, stream.spec, replay, run_keys, settings.envs, stream.observation.dtype
        )
        self._updates, self._period = rhythm(settings)
        self._began = time.time()

    def start(self, state: State | None) -> None:
        """Begins, with learners in ``state`` if it is given."""
        self.carry = self._loop.init()
        if state is not None:
            self.carry = self.carry._replace(state=state)
        self._begin()

    def advance(self, until: int, bar: Any, stopping: list[int]) -> None:
        """Steps and learns until ``step`` is ``until``, or until asked to stop.

        Raises:
          FloatingPointError, RuntimeError: as `rl.envs.stream.Stream.step`.
        """
        settings, died = self._settings, -1
        while self.step < until and not stopping:
            try:
                said = self._stream.step(self.action.reshape(-1, *self.action.shape[2:]))
            except envs.WorkerDied as death:
                if died == self.step:  # at once again: another try would not help
                    self._failed = True
                    raise
                died, self.deaths = self.step, self.deaths + 1
                print(f"\n{death}: started again, with new episodes; nothing is lost", file=sys.stderr)
                self._stream.restart()
                self._begin()
                continue
            except Exception:
                self._failed = True
                raise
            self.whole = False
            self.step += settings.envs
            learning = (
                self.step >= settings.learning_starts and self.step % (settings.envs * self._period) == 0
            )
            self.carry, action = self._loop.step(
                self.carry,
                self._tell(said),
                self._logged,
                self._updates if learning else 0,
                self._random(),
            )
            self.action = np.asarray(action)
            self.whole = True
            bar.update(settings.envs)

    def read(self) -> dict[str, np.ndarray]:
        """What there is to say of the time since the last call: {"train/...": [S]}.

        Raises:
          train.Diverged: a metric was not finite.
        """
        report = jax.device_get(online.reading(self.carry.tally))
        train.check_finite(report)
        said = {f"train/{name}": value for name, value in report.metrics.items() if np.isfinite(value).all()}
        self.carry = self.carry._replace(
            tally=online.fresh_tally(sorted(report.metrics), self._settings.seeds)
        )
        finished, self._stream.finished = self._stream.finished, []
        for place, name in ((1, "return"), (2, "length")):
            own: list[list[float]] = [[] for _ in range(self._settings.seeds)]
            for episode in finished:
                own[episode[0] // self._settings.envs].append(episode[place])
            said[f"train/{name}"] = np.array([np.mean(x) if x else math.nan for x in own])
        return said

    def save(self, folder: Path, card: dict[str, Any]) -> None:
        """Writes a checkpoint, from which new episodes start if an environment failed."""
        notes = {
            "stream": self._stream.lost() if self._failed else self._stream.snapshot(),
            "finished": self._stream.finished,
            "deaths": self.deaths,
            "evaluated": self.evaluated,
        }
        checkpoint.save(folder, self.step, self._tree(self.carry, self.action), card, notes=notes)

    def restore(self, folder: Path, card: dict[str, Any]) -> bool:
        """Goes on from the newest checkpoint in ``folder``; False if there is none."""
        carry = jax.eval_shape(self._loop.init)
        like = self._tree(carry, np.zeros(carry.action.shape, carry.action.dtype))
        found = checkpoint.restore(folder, like, card)
        if found is None:
            return False
        tree, self.step = found
        self.carry, self.action = tree["loop"]._replace(state=tree["state"]), tree["action"]
        self._began = time.time() - tree["seconds"].item()
        notes = (checkpoint.inspect(folder) or {})["notes"]
        self.deaths, self.evaluated = notes["deaths"], notes["evaluated"]
        self._stream.finished = [tuple(episode) for episode in notes["finished"]]
        if not self._stream.restore(notes["stream"]):
            print(f"new episodes start here: {notes['stream']['reason']}", file=sys.stderr)
            self._begin()
        return True

    def seconds(self) -> float:
        """Wall time of the run so far."""
        return time.time() - self._began

    def _tree(self, carry: online.Carry, action: np.ndarray) -> dict[str, Any]:
        seconds = np.asarray(self.seconds())
        return {
            "state": carry.state,
            "loop": carry._replace(state=None),
            "action": action,
            "seconds": seconds,
        }

    def _begin(self) -> None:
        seen = self._by_seed(self._stream.observation)
        self.carry, action = self._loop.begin(self.carry, seen, self._random())
        self.action = np.asarray(action)

    def _random(self) -> bool:
        return self.step < self._settings.learning_starts and not self._settings.init_from

    def _tell(self, said: Experience) -> online.Step:
        scalar = np.stack([_reward(self._settings, said.reward), ~said.terminated, said.first])
        both = np.stack([said.next_observation, said.observation])
        shape = (self._settings.seeds, self._settings.envs)
        return online.Step(both.reshape(2, *shape, *both.shape[2:]), scalar.reshape(3, *shape))

    def _by_seed(self, rows: np.ndarray) -> np.ndarray:
        """[S * N, ...] -> [S, N, ...]."""
        return rows.reshape(self._settings.seeds, self._settings.envs, *rows.shape[1:])


def rhythm(settings: Settings) -> tuple[int, int]:
    """How many updates are made after every how many steps of the environments together.

    Raises:
      ValueError: the ratio of updates to steps does not come out even.
    """
    ratio = Fraction(settings.utd).limit_denominator(1000) * settings.envs
    if 1 not in (ratio.numerator, ratio.denominator) or abs(ratio / settings.envs - settings.utd) > 1e-9:
        raise ValueError(
            f"--utd={settings.utd} times --envs={settings.envs} must be a whole number, or one over a whole number"
        )
    return ratio.numerator, ratio.denominator


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on numbers that no run can have."""
    for name in ("seeds", "steps", "envs", "replay", "batch_size", "n_step", "eval_every", "save_every"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(settings, name)}")
    if settings.eval_episodes < 2:
        raise ValueError(
            f"--eval_episodes={settings.eval_episodes}: give at least 2, since a policy is selected by one half "
            "of them and scored on the other"
        )
    if settings.utd <= 0:
        raise ValueError(f"--utd must be positive, not {settings.utd}")
    rhythm(settings)
    for name in ("steps", "eval_every"):
        if getattr(settings, name) % settings.envs:
            raise ValueError(
                f"--{name}={getattr(settings, name)} is not a multiple of --envs={settings.envs}"
            )
    if settings.save_every % settings.eval_every:
        raise ValueError(
            f"--save_every={settings.save_every} is not a multiple of --eval_every={settings.eval_every}"
        )
    if settings.steps % settings.eval_every:
        raise ValueError(f"--steps={settings.steps} is not a multiple of --eval_every={settings.eval_every}")
    if settings.learning_starts < 1:
        raise ValueError(
            "--learning_starts must be at least 1: there is nothing to draw before the first step"
        )
    if _atari(settings.env) and settings.learning_starts <= settings.envs * (_FRAMES + settings.n_step):
        raise ValueError(
            f"--learning_starts={settings.learning_starts} is too early for stacked frames: it must be more than "
            f"--envs times ({_FRAMES} + --n_step)"
        )
    if settings.priority and settings.offline_data:
        raise ValueError("--priority and --offline_data cannot be combined: logged steps have no priorities")
    if settings.offline_data and not 0 < settings.offline_ratio < 1:
        raise ValueError(f"--offline_ratio={settings.offline_ratio} must be between 0 and 1")
    unbounded = math.isnan(settings.head_low) or math.isnan(settings.head_high)
    if settings.head not in ("scalar", "quantile") and unbounded and not settings.init_from:
        raise ValueError(
            f"--head={settings.head} needs --head_low and --head_high, the smallest and largest value it must "
            "represent: nothing tells them before there are data"
        )


def folder(settings: Settings) -> Path:
    """The run folder: as chosen, or by what is trained."""
    task = settings.env.replace("/", "-")
    return offline.folder(
        offline.Settings(workdir=settings.workdir, dataset=task, agent=settings.agent, head=settings.head)
    )


def stepper(settings: Settings) -> Stream:
    """The environments to learn in."""
    processes = settings.env_processes if settings.env_processes >= 0 else None
    alone = settings.seeds * settings.envs == 1
    return Stream(
        settings.env,
        [
            (_SEEDS, settings.seed, seed, number)
            for seed in range(settings.seeds)
            for number in range(settings.envs)
        ],
        0 if processes is None and alone else processes,
    )


def parts(settings: Settings, config: Any, spec: Spec) -> tuple[Learner, online.Replay, Dataset | None]:
    """The learner, its memory, and the logged data that are mixed in."""
    low, high = support(settings)
    learner = agents.get(settings.agent).make(
        config, spec, heads.make(settings.head, low, high, settings.head_size)
    )
    logged = mixture(settings, spec)
    several = (settings.n_step, getattr(config, "discount", 1.0), settings.envs)
    view = (
        online.video(spec.observation_shape[-1], *several) if _atari(settings.env) else online.steps(*several)
    )
    if settings.priority:
        exponents = settings.priority, settings.priority_correction
        return learner, online.ranked(learner, view, settings.replay, settings.batch_size, *exponents), None
    mixed = round(settings.offline_ratio * settings.batch_size) if logged else 0
    return (
        learner,
        online.uniform(learner, view, settings.replay, settings.batch_size, logged=mixed),
        logged,
    )


def mixture(settings: Settings, spec: Spec) -> Dataset | None:
    """The logged data of ``--offline_data``, with rewards as the agent sees them."""
    if not settings.offline_data:
        return None
    loaded = data.load(settings.offline_data)
    if loaded.spec != spec:
        raise ValueError(
            f"--offline_data={settings.offline_data} does not fit {settings.env}: {loaded.spec} and {spec}"
        )
    steps = loaded.dataset.transitions
    return loaded.dataset._replace(transitions=steps._replace(reward=_reward(settings, steps.reward)))


def support(settings: Settings) -> tuple[float, float]:
    """The values that a categorical head must represent: as the flags say, or as the run that is continued had."""
    low, high = settings.head_low, settings.head_high
    if settings.init_from and (math.isnan(low) or math.isnan(high)):
        card = _source(settings)[0]["card"]
        low, high = card.get("support") or (card["settings"]["head_low"], card["settings"]["head_high"])
    return (0.0, 1.0) if math.isnan(low) or math.isnan(high) else (low, high)  # other heads have none


def initial(settings: Settings, learner: Learner, spec: Spec) -> State:
    """The learners' state [S, ...] as the run ``--init_from`` left it: its first seeds.

    Raises:
      ValueError: there is no such run, or it trained something else.
    """
    record, arrays = _source(settings)
    card = record["card"]
    said = {"agent": card["agent"], "head": card["settings"]["head"], "seeds": card["settings"]["seeds"]}
    if (said["agent"], said["head"]) != (settings.agent, settings.head) or said["seeds"] < settings.seeds:
        raise ValueError(
            f"--init_from={settings.init_from} holds {said}: give --agent={said['agent']} --head={said['head']} "
            f"and at most --seeds={said['seeds']}"
        )
    if card["settings"].get("normalize_observations"):
        raise ValueError(
            f"--init_from={settings.init_from} was trained on standardised observations, which the environment "
            "does not return: train it without --normalize_observations"
        )
    like = jax.eval_shape(learner.init, jax.random.key(0), online.example(spec))
    found = []
    for name, leaf in checkpoint.named({"state": like}).items():
        array = arrays.get(name)
        array = array if array is None or name == "state/step" else array[: settings.seeds]
        shape = leaf.shape if name == "state/step" else (settings.seeds, *leaf.shape)
        if array is None or array.shape != shape:
            raise ValueError(
                f"--init_from={settings.init_from}: its {name} is {None if array is None else array.shape}, here "
                f"it is {shape}; give the same --agent.* flags as there"
            )
        found.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), found)


def _source(settings: Settings) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    place = Path(settings.init_from).expanduser()
    found = checkpoint.read(place if place.name == "checkpoints" else place / "checkpoints")
    if found is None:
        raise ValueError(f"--init_from={settings.init_from}: there is no checkpoint")
    return found


@contextmanager
def scorer(settings: Settings, learner: Learner) -> Iterator[Callable[[State, int], dict[str, np.ndarray]]]:
    """A function (state, number of the evaluation) -> {"eval/...": [S, episodes]}, on the CPU."""
    cpu = jax.local_devices(backend="cpu")[0]
    with evaluate.evaluator(
        acting.over_seeds(acting.actor(learner), train.STACKED),
        settings.env,
        seeds=settings.seeds,
        episodes=settings.eval_episodes,
        processes=None if settings.eval_processes < 0 else settings.eval_processes,
        base_seed=settings.seed,
    ) as episodes:

        def score(state: State, index: int) -> dict[str, np.ndarray]:
            with jax.default_device(cpu):
                found = episodes(jax.device_put(state, cpu), index)
            return {f"eval/{name}": value for name, value in found.items()}

        yield score


def export(path: Path, state: State) -> None:
    """Writes what acts, alone: the policy's parameters or, where there is none, those of Q, [S, ...] each."""
    checkpoint.export(path, state.params["policy" if "policy" in state.params else "q"])


def _reward(settings: Settings, reward: np.ndarray) -> np.ndarray:
    """As the agent sees it, float32."""
    scaled = settings.reward_scale * reward
    return np.asarray(np.clip(scaled, -1, 1) if settings.clip_rewards else scaled, np.float32)


def _atari(env: str) -> bool:
    return env.startswith("ALE/")


def defaults(env: str, agent: str, head: str) -> tuple[Settings, Any]:
    """Settings and hyper-parameters where no flag says otherwise.

    For DQN on Atari games those of Dopamine, with which "Stop Regressing" (Farebrother et al. 2024, tables B.1 to
    B.3) compared value representations: 200 million frames, Adam's step by the kind of head.
    """
    settings, config = Settings(env=env, agent=agent, head=head), agents.get(agent).Config()
    if agent != "dqn" or not _atari(env):
        return settings, config
    settings = dataclasses.replace(
        settings,
        steps=50_000_000,
        utd=0.25,
        learning_starts=20_000,
        batch_size=32,
        clip_rewards=True,
        eval_every=250_000,
        save_every=1_000_000,
        **({} if head == "scalar" else {"head_low": -10.0, "head_high": 10.0, "head_size": 51}),
    )
    adam = (6.25e-5, 1.5e-4) if head == "scalar" else (2.5e-4, 3.125e-4)
    return settings, dataclasses.replace(
        config,
        double=False,
        target_rate=1.0,
        target_period=2000,
        epsilon=0.01,
        epsilon_updates=62_500,
        learning_rate=adam[0],
        adam_epsilon=adam[1],
        hidden=(512,),
    )


def main(_: list[str]) -> None:
    asked = flags.read(Settings())
    settings, config = defaults(asked.env, asked.agent, asked.head)
    result = run(
        flags.with_fields(settings, flags.given(settings)),
        flags.with_fields(config, flags.given(config, "agent.")),
    )
    offline.show(result)


if __name__ == "__main__":
    app.run(
        flags.reporting(main), flags_parser=flags.parser(Settings(), lambda name: agents.get(name).Config())
    )
