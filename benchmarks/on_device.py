"""Learning in environments that are JAX: steps per second of one compiled program, beside the loop on the host.

    python -m benchmarks.on_device

DQN on CartPole with networks of 64 x 64, batches of 32 and an update after every four steps, for several numbers of
seeds and environments:

  on the device   `rl.on_device` in gymnax's CartPole: acting, learning and the environment are one program
  on the host     `rl.interaction` in gymnasium's: two compiled calls a step, environments stepped in this process

and what the first is made of, measured alone:

  updates         as many updates of as many seeds in one compiled call, from the same replay: the bound
  environment     steps of the environments with random actions, in one compiled call

A round runs each of them once, and the table holds medians over --repeats rounds. Nothing else should run meanwhile.
The table is printed and stored with every single time in results/benchmarks/on_device-HARDWARE.{json,md}.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import app

from benchmarks import table, timing
from experiments import flags, studies
from rl import interaction, keys, log, on_device, online, train
from rl.agents import dqn
from rl.envs import functional
from rl.envs.stream import Stream
from rl.replay import ring
from rl.values import heads

DEVICE, HOST, UPDATES, ENVIRONMENT = "on the device", "on the host", "updates", "environment"
BATCH, RHYTHM, HIDDEN = 32, (1, 4), (64, 64)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    seeds: tuple[int, ...] = (1, 8)  # learners at once
    envs: tuple[int, ...] = (1, 64)  # environments of each
    head: str = "scalar"  # value representation
    steps: int = 2_000  # steps of every environment per timed call, a multiple of 4
    replay: int = 100_000  # steps that each learner remembers
    repeats: int = 5  # rounds
    out: str = ""  # JSON file; by default results/benchmarks/on_device-HARDWARE.json


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results."""
    results: dict[str, Any] = {**log.provenance(), "settings": dataclasses.asdict(settings), "rows": []}
    path = Path(settings.out or f"results/benchmarks/on_device-{table.slug(results['hardware'])}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [(seeds, envs) for seeds in settings.seeds for envs in settings.envs]
    with log.progress(len(sizes) * (settings.repeats + 1), "rounds") as bar:
        for seeds, envs in sizes:
            bar.set_postfix_str(f"{seeds} seeds, {envs} environments")
            calls = cases(settings, seeds, envs)
            times = timing.measure(list(calls.values()), settings.repeats, lambda *_: bar.update())
            results["rows"] += [
                {"seeds": seeds, "envs": envs, "loop": loop, "seconds": seconds}
                for loop, seconds in zip(calls, times, strict=True)
            ]
            log.write_json(path, results)
    with log.replacing(path.with_suffix(".md")) as partial:
        partial.write_text(render(results))
    return results


def cases(settings: Settings, seeds: int, envs: int) -> dict[str, Callable[[], Any]]:
    """Every loop by its name; a call makes ``settings.steps`` steps of every environment."""
    world = functional.make("gymnax/CartPole-v1")
    learner = dqn.make(dqn.Config(hidden=HIDDEN), world.spec, heads.make(settings.head, 0.0, 100.0, size=51))
    replay = online.uniform(learner, online.steps(environments=envs), settings.replay, BATCH)
    run_keys = keys.seeds(jax.random.key(0), seeds)
    copies = [(seed, number) for seed in range(seeds) for number in range(envs)]
    common: dict[str, Any] = {"rhythm": RHYTHM, "learning_starts": BATCH, "random": BATCH}
    here: Any = on_device.Trainer(world, learner, replay, run_keys, **common)
    there: Any = interaction.Trainer(Stream("CartPole-v1", copies, 0), learner, replay, run_keys, **common)

    def loop(trainer: Any) -> Callable[[], Any]:
        trainer.start()
        return lambda: trainer.advance(trainer.step + settings.steps * envs)

    loops = {DEVICE: loop(here), HOST: loop(there)}
    here.advance(settings.steps * envs)
    # Copies, since the loop goes on writing into its own.
    state, memory = jax.tree.map(lambda x: x.copy(), (here.carry.state, here.carry.memory))
    epoch = train.scan_updates(learner.update, ring.sampler(BATCH), settings.steps // RHYTHM[1])
    updates = jax.jit(jax.vmap(epoch, (train.STACKED, ring.STACKED, 0), (train.STACKED, 0)))

    @jax.jit
    def play(state: Any, key: Any) -> Any:
        def step(state: Any, key: Any) -> tuple[Any, Any]:
            action = jax.random.randint(key, (seeds * envs,), 0, world.spec.action_size)
            made = world.step(jax.random.split(key, seeds * envs), state, action)
            return made.state, made.reward.sum()

        return jax.lax.scan(step, state, jax.random.split(key, settings.steps))[1]

    begun = world.reset(jax.random.split(jax.random.key(0), seeds * envs))[1]
    return {
        **loops,
        UPDATES: lambda: jax.block_until_ready(updates(state, memory, run_keys)),
        ENVIRONMENT: lambda: jax.block_until_ready(play(begun, jax.random.key(0))),
    }


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    steps = results["settings"]["steps"]
    medians = {
        (row["seeds"], row["envs"], row["loop"]): statistics.median(row["seconds"]) for row in results["rows"]
    }
    cells = [("seeds", "environments of each", "loop", "steps/s", "updates/s", f"x {HOST}", "of its parts")]
    for (seeds, envs, loop), seconds in medians.items():
        of = lambda name, seeds=seeds, envs=envs: medians[seeds, envs, name]
        parts = (of(UPDATES) + of(ENVIRONMENT)) / seconds
        cells.append(
            (
                str(seeds),
                str(envs),
                loop,
                studies.digits(steps * seeds * envs / seconds) if loop != UPDATES else "",
                studies.digits(steps * seeds / RHYTHM[1] / seconds) if loop != ENVIRONMENT else "",
                studies.digits(of(HOST) / seconds) if loop == DEVICE else "",
                studies.digits(parts) if loop == DEVICE else "",
            )
        )
    about = (
        "Steps and updates are those of all seeds together. *Of its parts*: the time that updates and environment take "
        "alone, divided by that of the loop."
    )
    return "\n".join([*table.source(results), "", *table.aligned(cells, texts={2}), "", about]) + "\n"


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
