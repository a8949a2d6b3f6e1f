"""Learning while acting: steps and updates per second, beside stable-baselines3's SAC on the same machine.

    python -m benchmarks.online

One environment and one seed, as both are used by default, networks of 256 x 256 and batches of 256:

  headway            `experiments.online`, everything but evaluation, logs and checkpoints
  stable-baselines3  its SAC in PyTorch on the CPU, with as many threads as it chooses, where it is installed; without
                     its Monitor around the environment, and without lines of its log

and what the first is made of, measured alone:

  updates            as many updates in one compiled call, from the same replay: the bound
  environment        steps of the environment without any learning

A round runs each of them once, and the table holds medians over --repeats rounds: what slows the machine slows all
of them. Nothing else should run meanwhile. The table is printed and stored with every single time in
results/benchmarks/online-HARDWARE.{json,md}.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from benchmarks import table, timing
from experiments import flags, interaction, online, studies
from rl import log, train
from rl.agents import sac
from rl.online import Carry
from rl.replay import ring
from rl.replay.transform import Transform
from rl.types import State

PEER = "stable-baselines3"
_LEFT_OUT = (
    f"No loop evaluates, writes a log or keeps checkpoints, and {PEER} has no Monitor around its environment."
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    envs: str = "Hopper-v5,HalfCheetah-v5"  # environments, comma-separated
    utds: tuple[int, ...] = (1, 4)  # updates per environment step
    steps: int = 1_000  # environment steps per timed call
    warm: int = 1_000  # steps before the first, with random actions
    replay: int = 1_000_000  # steps that are remembered
    repeats: int = 5  # rounds
    peer: bool = True  # measure stable-baselines3 too, where it is installed
    out: str = ""  # JSON file; by default results/benchmarks/online-HARDWARE.json


class Case(NamedTuple):
    """One row of the table."""

    env: str
    utd: int
    loop: str
    call: Callable[[], Any]  # its ``steps`` steps and their updates are done when it returns


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results."""
    versions = _peer_versions() if settings.peer else {}
    results: dict[str, Any] = {
        **log.provenance(),
        "settings": dataclasses.asdict(settings),
        "peer": versions,
        "left_out": _LEFT_OUT,
        "rows": [],
    }
    path = table.place(settings.out, "online", results)
    pairs = [(env, utd) for env in settings.envs.split(",") for utd in settings.utds]
    with log.progress(len(pairs) * (settings.repeats + 1), "rounds") as bar:
        for env, utd in pairs:
            bar.set_postfix_str(f"{env}, {utd} updates a step")
            results["rows"] += _measure(_cases(settings, env, utd, bool(versions)), settings, bar.update)
            table.write(path, results, render(results))
    return results


def _cases(settings: Settings, env: str, utd: int, peer: bool) -> list[Case]:
    chosen = online.Settings(env=env, utd=float(utd), replay=settings.replay, learning_starts=settings.warm)
    stream, bare = (interaction.stepper(chosen) for _ in range(2))
    learner, replay = online.learner_and_replay(chosen, sac.Config(), stream.spec)
    trainer = online.make_trainer(chosen, stream, learner, replay, Transform(), None)
    trainer.start(None)
    trainer.advance(settings.warm, _Silent(), [])
    state, held = jax.tree.map(jnp.copy, _alone(trainer.carry, settings.warm))
    sample = ring.sampler(chosen.batch_size)
    updates = jax.jit(train.scan_updates(learner.update, sample, settings.steps * utd))
    rng = np.random.default_rng(0)

    def step() -> None:
        for _ in range(settings.steps):
            bare.step(rng.uniform(-1, 1, (1, bare.spec.action_size)))

    cases = [
        Case(env, utd, "headway", lambda: trainer.advance(trainer.step + settings.steps, _Silent(), [])),
        Case(env, utd, "updates", lambda: jax.block_until_ready(updates(state, held, jax.random.key(0)))),
        Case(env, utd, "environment", step),
    ]
    return [*cases, Case(env, utd, PEER, _peer(env, utd, settings))] if peer else cases


def _alone(carry: Carry, rows: int) -> tuple[State, ring.Ring]:
    """The only seed's state, and a replay of the first ``rows`` that it holds."""
    state = train.member(carry.state, 0)
    held = jax.tree.map(lambda x: x[0, :rows], carry.memory.rows)
    return state, ring.Ring(held, jnp.zeros((), jnp.int32), jnp.full((), rows, jnp.int32))


class _Silent:
    """A progress bar that shows nothing."""

    def update(self, count: int) -> None:
        pass


def _peer(env: str, utd: int, settings: Settings) -> Callable[[], Any]:
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = stable_baselines3.SAC(
        "MlpPolicy",
        DummyVecEnv([lambda: gymnasium.make(env)]),  # around which it puts no Monitor
        learning_starts=settings.warm,
        gradient_steps=utd,
        buffer_size=settings.replay,
        device="cpu",
        seed=0,
    )
    model.learn(settings.warm + 1, log_interval=None)
    return lambda: model.learn(settings.steps, log_interval=None, reset_num_timesteps=False)


def _peer_versions() -> dict[str, str]:
    """Of stable-baselines3 and PyTorch; empty where they are not installed."""
    try:
        return {name: importlib.metadata.version(name) for name in (PEER, "torch")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _measure(cases: list[Case], settings: Settings, finished: Callable[[int], Any]) -> list[dict[str, Any]]:
    times = timing.measure([case.call for case in cases], settings.repeats, lambda *_: finished(1))
    return [
        {"env": case.env, "utd": case.utd, "loop": case.loop, "seconds": seconds}
        for case, seconds in zip(cases, times, strict=True)
    ]


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    steps = results["settings"]["steps"]
    medians = {
        (row["env"], row["utd"], row["loop"]): statistics.median(row["seconds"]) for row in results["rows"]
    }
    other = " on the CPU" * (results["hardware"]["backend"] != "cpu")  # which the rest is not
    cells = [("environment", "updates per step", "loop", "steps/s", "updates/s", f"x {PEER}{other}")]
    for (env, utd, loop), seconds in medians.items():
        theirs = medians.get((env, utd, PEER))
        cells.append(
            (
                env,
                str(utd),
                loop + other * (loop == PEER),
                studies.digits(steps / seconds) if loop != "updates" else "",
                studies.digits(steps * utd / seconds) if loop != "environment" else "",
                studies.digits(theirs / seconds) if theirs and loop == "headway" else "",
            )
        )
    lines = [*table.source(results, results["peer"]), "", *table.aligned(cells, texts={0, 2})]
    if not results["peer"]:
        lines.append(f"{PEER} is not installed: pip install stable-baselines3")
    elif "left_out" in results:  # older results have its Monitor and its log
        lines += ["", results["left_out"]]
    return "\n".join(lines) + "\n"


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
