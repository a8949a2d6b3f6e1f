"""CartPole by DQN with every value head, Pendulum by SAC and TD3: the online agents on tasks of a minute each.

    python -m experiments.classic_control --seeds=5

One run of `experiments.online` per agent and head, all seeds at once; curves, a table and result.json with
everything land in the work folder.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from absl import app

from experiments import flags, online
from rl import log, plot
from rl.agents import dqn, sac, td3
from rl.values import heads

SOLVED = {"CartPole-v1": 475.0, "Pendulum-v1": -200.0}  # gymnasium's threshold; a swing-up that stays up

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
class Settings:
    """What can be chosen."""

    seeds: int = 5  # seeds of each agent, trained at once
    seed: int = 0  # another value gives other seeds
    workdir: str = "runs/classic_control"  # where everything lands


def run(settings: Settings) -> dict[str, Any]:
    """Trains all of `RUNS`, draws them, and returns what result.json holds."""
    workdir = Path(settings.workdir)
    results = {}
    for label, (chosen, config) in RUNS.items():
        own = dataclasses.replace(
            chosen, seeds=settings.seeds, seed=settings.seed, workdir=str(folder(workdir, label))
        )
        results[label] = online.run(own, config)
    for env, solved in SOLVED.items():
        curves = {label: _curve(workdir, label) for label, run in RUNS.items() if run[0].env == env}
        plot.learning_curve(
            workdir / f"{env}.png",
            curves,
            ylabel="return",
            title=env,
            xlabel="environment steps",
            references={"solved": solved},
        )
    result = {
        **log.provenance(),
        "runs": {label: {"env": RUNS[label][0].env, **found} for label, found in results.items()},
    }
    log.result(workdir, result)
    with log.replacing(workdir / "table.md") as partial:
        partial.write_text(table(results))
    return result


def table(results: dict[str, Any]) -> str:
    """Returns at the end of training, as Markdown."""
    lines = ["| environment | agent | return, 95 % interval | best evaluation |", "|---|---|---|---|"]
    for label, found in results.items():
        last, best = found["scores"]["return"]["last"], found["scores"]["return"]["best"]
        low, high = last["ci95"]
        lines.append(
            f"| {RUNS[label][0].env} | {label} | {last['mean']:.0f} [{low:.0f}, {high:.0f}] | {best['mean']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def folder(workdir: Path, label: str) -> Path:
    """Where the run called ``label`` lies."""
    return workdir / label.replace(", ", "-")


def _curve(workdir: Path, label: str) -> Any:
    steps, returns = log.series(folder(workdir, label), "eval/return")
    return steps, returns.mean(-1)


def main(_: list[str]) -> None:
    settings = flags.read(Settings())
    result = run(settings)
    print(table(result["runs"]))
    print(f"Everything is in {settings.workdir}.")


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
