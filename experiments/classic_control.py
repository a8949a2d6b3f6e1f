"""CartPole by DQN with every value head, Pendulum by SAC and TD3: the online agents on tasks of a minute each.

    python -m experiments.classic_control --seeds=5

One run of `experiments.online` per agent and head, all seeds at once; with five seeds, ten minutes of two cores. That
they get near to solving their tasks (`CLAIMED`) is claimed of the stored result, which tests read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import online, studies
from rl import log, plot
from rl.agents import dqn, sac, td3
from rl.values import heads

SOLVED = {"CartPole-v1": 475.0, "Pendulum-v1": -200.0}  # gymnasium's threshold; a swing-up that stays up
CLAIMED = {"CartPole-v1": 400.0, "Pendulum-v1": -250.0}  # from 20 steps of balance at random, and from -1200

_CART_POLE = online.Settings(
    agent="dqn",
    env="CartPole-v1",
    envs=8,
    utd=0.125,
    steps=102_400,
    learning_starts=1_024,
    replay=102_400,
    batch_size=128,
    n_step=10,
    head_size=51,
    head_low=0.0,
    head_high=110.0,
    eval_every=12_800,
    save_every=102_400,
)
_PENDULUM = online.Settings(
    env="Pendulum-v1",
    steps=10_000,
    learning_starts=500,
    replay=10_000,
    batch_size=128,
    eval_every=2_000,
    save_every=10_000,
)
# Values are at most 100. Few updates for each step, over ten steps: with one update per step and fewer steps the
# squared error forgets how to balance (the categorical heads do not).
_DQN = dqn.Config(
    hidden=(128, 128),
    learning_rate=1e-3,
    target_rate=0.01,
    epsilon_updates=3_000,
)
_TD3 = td3.Config(hidden=(64, 64), learning_rate=1e-3, target_rate=0.02, exploration_noise=0.2)

# {label: (settings, hyper-parameters)}
RUNS: dict[str, tuple[online.Settings, Any]] = {
    **{f"dqn, {head}": (dataclasses.replace(_CART_POLE, head=head), _DQN) for head in heads.NAMES},
    "sac": (_PENDULUM, sac.Config(hidden=(128, 128), learning_rate=1e-3)),
    "td3": (dataclasses.replace(_PENDULUM, agent="td3"), _TD3),
}


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen."""

    seeds: int = 5  # seeds of each agent, trained at once
    seed: int = 0  # another value gives other seeds
    workdir: str = "runs/classic_control"  # of the runs
    out: str = "results/classic_control"


def run(settings: Settings) -> dict[str, Any]:
    """Trains all of `RUNS`, draws them, and returns what result.json holds."""
    variants = {}
    for label, (chosen, config) in RUNS.items():
        run_settings = dataclasses.replace(chosen, seeds=settings.seeds, seed=settings.seed)
        fields = {**dataclasses.asdict(run_settings), "config": dataclasses.asdict(config)}
        variants[label] = studies.Variant(functools.partial(train, run_settings, config), fields)
    runs = studies.train(settings, variants, "classic control").outcomes
    result = studies.finish(settings, {"runs": runs}, report, claims, "table.md")
    for env, solved in SOLVED.items():
        curves = {label: run["curve"] for label, run in runs.items() if run["env"] == env}
        plot.learning_curve(
            Path(settings.out) / f"{env}.png",
            {label: (curve["steps"], curve["return"]) for label, curve in curves.items()},
            ylabel="return",
            title=env,
            xlabel="environment steps",
            references={"solved": solved},
        )
    return result


def train(settings: online.Settings, config: Any, work: studies.Work) -> dict[str, Any]:
    """One run: what its result.json holds, and the mean return of each seed [T, S] over environment steps [T]."""
    result = online.run(dataclasses.replace(settings, workdir=str(work.folder)), config)
    steps, returns = log.series(work.folder, "eval/return")
    return {"env": settings.env, **result, "curve": {"steps": steps, "return": returns.mean(-1)}}


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """Every agent with every head does what it is there for, on average over seeds."""
    for label, run in result["runs"].items():
        least = CLAIMED[run["env"]]
        yield studies.Claim(
            f"{run['env']}, {label}: mean return above {least:g}",
            f"solved at {SOLVED[run['env']]:g}",
            run["scores"]["return"]["last"]["per_seed"],
            studies.summarised(lambda mean, least=least: mean > least),
        )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """Returns at the end of training, as Markdown."""
    rows = []
    for label, run in result["runs"].items():
        last, best = run["scores"]["return"]["last"], run["scores"]["return"]["best"]
        rows.append((run["env"], label, studies.between(last, ".0f"), f"{best['mean']:.0f}"))
    yield studies.table(("environment", "agent", "return, 95 % interval", "best evaluation"), rows)


if __name__ == "__main__":
    studies.main(Settings(), run, "table.md")
