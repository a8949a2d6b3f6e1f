"""Turn a training run of SAC into the behaviour policies of a robot's locomotion tiers.

    python -m experiments.online --agent=sac --env=Hopper-v5 --workdir=runs/hopper
    python -m experiments.actors --run=runs/hopper --out=rl/data/recipes/actors/Hopper-v5.npz

Every snapshot that the run left is played, with the actions sampled as in the data, in NumPy and with the weights
rounded to float16 as they are stored. The expert is the best of them; the medium policy is the one nearest to a third
of the expert's return among those up to the first that reaches it; a few before it stand for the replay buffer.
Those chosen are played again, in new episodes: the returns in the file were not what they were chosen by.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app

from experiments import common, flags
from rl import checkpoint, envs, log
from rl.data import d4rl
from rl.data.recipes import behaviour, locomotion
from rl.networks import mlp
from rl.replay import transform
from rl.replay.transform import Transform

_MEMORY = "loop/memory"  # where checkpoints of experiments.online keep the replay


@dataclasses.dataclass(frozen=True)
class Settings:
    """What can be chosen about the export."""

    run: str = ""  # the run's folder
    member: int = 0  # which of the run's seeds
    out: str = ""  # the file to write
    buffer: str = ""  # also write the run's replay buffer up to the medium policy, as HDF5 in D4RL's layout
    episodes: int = 10  # of each snapshot, to choose by; ten times as many of those chosen
    snapshots: int = 10  # at most this many for the replay tier, the medium policy included
    seed: int = 0  # of the episodes


class Choice(NamedTuple):
    """Indices of snapshots."""

    replay: np.ndarray  # increasing; the last is the medium policy
    expert: int


def choose(returns: np.ndarray, snapshots: int) -> Choice:
    """The snapshots to keep by their mean returns [S] in the order of training.

    Raises:
      ValueError: no return is positive, or no snapshot but the expert comes near a third of its return.
    """
    expert = int(returns.argmax())
    if not returns[expert] > 0:
        raise ValueError(
            f"the best snapshot's mean return is {returns[expert]:g}: the medium policy is the one nearest to a third "
            "of it, which needs a positive return"
        )
    goal = returns[expert] / 3
    reached = int(np.argmax(returns >= goal))
    medium = int(np.abs(returns[: reached + 1] - goal).argmin())
    if medium == expert:
        raise ValueError(
            "the best snapshot is also the nearest to a third of its return: save snapshots more often"
        )
    before = np.linspace(0, medium, snapshots)[:-1].round().astype(int)
    return Choice(np.unique([*before, medium]), expert)


def run(settings: Settings) -> behaviour.Actors:
    """Writes the file and returns what it holds.

    Raises:
      ValueError: a setting is missing, the folder holds no snapshots or none that NumPy can play, `choose` finds no
        medium policy, or D4RL has no returns for ``buffer``.
    """
    if not (settings.run and settings.out):
        raise ValueError("--run and --out must both be given")
    actors = read(Path(settings.run), settings.member)
    name, size = actors.card["environment"], _action_size(actors)
    if settings.buffer:  # what the file needs: refused sooner than after all the episodes
        d4rl.locomotion_reference(name)
        read_buffer(Path(settings.run), settings.member, int(actors.steps[0]))
    first = play(name, map(actors.policy, range(len(actors.steps))), settings.episodes, (settings.seed, 0))
    choice = choose(first.mean(1), settings.snapshots)
    indices = [*choice.replay, choice.expert]
    again = 10 * settings.episodes
    returns = play(name, map(actors.policy, indices), again, (settings.seed, 1))
    random = play(name, [locomotion.uniform(size)], again, (settings.seed, 2))[0]
    chosen = behaviour.Actors(
        kernels=[kernel[indices] for kernel in actors.kernels],
        biases=[bias[indices] for bias in actors.biases],
        steps=actors.steps[indices],
        returns=returns,
        random_returns=random,
        card=actors.card | {"medium": len(choice.replay) - 1, "expert": len(choice.replay)},
    )
    behaviour.save(Path(settings.out), chosen)
    if settings.buffer:
        steps = int(chosen.steps[chosen.card["medium"]])
        locomotion.write_buffer(
            Path(settings.buffer), read_buffer(Path(settings.run), settings.member, steps), chosen
        )
    return chosen


def read(folder: Path, member: int) -> behaviour.Actors:
    """All snapshots that the run in ``folder`` left after its warm-up, with no returns yet.

    Raises:
      ValueError: it is no run or one of another script, there are no snapshots, or they are of another kind of network.
    """
    if not (folder / log.CONFIG).exists():
        raise ValueError(f"--run={folder} holds no run: there is no {log.CONFIG}{common.runs_below(folder)}")
    config = json.loads((folder / log.CONFIG).read_text())
    recorded = config["config"]["settings"]
    if "learning_starts" not in recorded:
        raise ValueError(
            f"--run={folder} is no run of experiments.online or experiments.mbpo, which leave snapshots"
        )
    _check_policy(folder, config["config"])
    # A killed run may leave one that it had not finished, whose hidden name is no number.
    snapshots = (folder / "actors").glob("*.npz")
    numbered = sorted((int(file.stem), file) for file in snapshots if file.stem.isdecimal())
    # A run that goes on with another acts by its policy from the first step on.
    random_steps = 0 if recorded.get("init_from") else recorded["learning_starts"]
    files = [file for step, file in numbered if step > random_steps]
    if not files:
        raise ValueError(f"{folder / 'actors'} holds no snapshots of a trained policy")
    policies = [_layers(file, member) for file in files]
    stacked = [np.stack(arrays).astype(np.float16) for arrays in zip(*policies, strict=True)]
    card = {
        "environment": recorded["env"],
        "random_steps": random_steps,
        "log_std": [mlp.LOG_STD_MIN, mlp.LOG_STD_MAX],
        "command": config["command"],
        "seed": recorded["seed"],
        "member": member,
        "commit": config["commit"],
        "versions": config["versions"],
    }
    return behaviour.Actors(
        kernels=stacked[0::2],
        biases=stacked[1::2],
        steps=np.array([int(file.stem) for file in files]),
        returns=np.zeros((len(files), 0), np.float32),
        random_returns=np.zeros(0, np.float32),
        card=card,
    )


def _check_policy(folder: Path, run: Mapping[str, Any]) -> None:
    """Raises ValueError where the policy is not what `behaviour.Policy` plays, although its parameters look like it."""
    network, seen = run.get("config", {}).get("network", {}), run.get("transform", {})
    usual = {"activation": "relu", "residual": False}
    others = [
        f"--agent.network.{name}={network[name]}"
        for name in usual
        if network.get(name, usual[name]) != usual[name]
    ]
    if seen.get("mean") is not None:
        others.append("--normalize_observations, of the run that it goes on with")
    if others:
        raise ValueError(
            f"the policy in {folder} was trained with {' and '.join(others)}, but actors are plain layers with ReLU on "
            "observations as the environment gives them: train one without"
        )


def _action_size(actors: behaviour.Actors) -> int:
    """How many numbers an action has, by the environment.

    Raises:
      ValueError: the networks' outputs are not a mean and a deviation of each.
    """
    env = envs.make(actors.card["environment"])
    spec = envs.spec(env)
    env.close()
    outputs = actors.kernels[-1].shape[-1]
    if spec.discrete or outputs != 2 * spec.action_size:
        raise ValueError(
            f"the run's networks have {outputs} outputs, but actors give a mean and a deviation of each number of an "
            f"action in {actors.card['environment']}, of which there are {spec.action_size}: train sac, sac_n, edac or "
            "cql in an environment of continuous actions, and single ones (--chunk=1)"
        )
    return spec.action_size


def read_buffer(folder: Path, member: int, steps: int) -> dict[str, np.ndarray]:
    """The first ``steps`` transitions of one seed's replay, from the run's last checkpoint, in D4RL's names.

    Raises:
      ValueError: the replay does not hold them as the environment gave them.
    """
    newest = checkpoint.read(folder / "checkpoints")
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint, and so no replay buffer")
    record, arrays = newest
    if f"{_MEMORY}/head" not in arrays:
        raise ValueError(
            f"the checkpoint of {folder} holds no replay as experiments.online keeps it: --buffer is for its runs"
        )
    settings, count = record["card"]["settings"], arrays[f"{_MEMORY}/count"]
    whole = count == record["step"]  # of all that were made; one that is just full has its head at the first
    if not whole or count < steps:
        raise ValueError(
            f"the replay of {folder} holds {count} steps and has {'' if whole else 'not '}kept the first: "
            f"{steps} from the first on are needed; train with --replay no less than --steps"
        )
    seen = transform.to_json(transform.from_json(record["card"]["transform"]))
    if settings["envs"] != 1 or seen != transform.to_json(Transform()):
        raise ValueError(
            "a buffer is written of runs with --envs=1 only, and "
            "without --reward_scale, --reward_shift and --clip_rewards"
        )
    rows = {
        name: arrays[f"{_MEMORY}/rows/{name}"][member]
        for name in ("observation", "action", "reward", "discount", "next_observation", "first")
    }
    terminals = rows["discount"][:steps] == 0
    return {
        "observations": rows["observation"][:steps],
        "actions": rows["action"][:steps],
        "rewards": rows["reward"][:steps],
        "terminals": terminals,
        "timeouts": np.append(rows["first"][1:steps], False) & ~terminals,
        "next_observations": rows["next_observation"][:steps],
    }


def _layers(file: Path, member: int) -> list[np.ndarray]:
    """[kernel, bias, kernel, bias, ...] of one seed's policy."""
    params = checkpoint.load_params(file)
    names = [f"Dense_{i}" for i in range(len(params))]
    if sorted(names) != sorted(params):
        raise ValueError(f"{file} is no plain multi-layer perceptron: it has {', '.join(params)}")
    seeds = len(params["Dense_0"]["bias"])
    if not 0 <= member < seeds:
        raise ValueError(f"--member={member}, but the run has {seeds} seeds, counted from 0")
    return [params[name][kind][member] for name in names for kind in ("kernel", "bias")]


def play(name: str, policies: Iterable[locomotion.Act], episodes: int, seed: tuple[int, ...]) -> np.ndarray:
    """The undiscounted returns [P, episodes] of P policies' sampled actions, each in the same seeds."""
    env = envs.make(name)
    if not hasattr(env.unwrapped, "data"):
        raise ValueError(
            f"the run is of {name}, and logs are collected in MuJoCo's tasks only: give one of these"
        )
    seeds = [np.random.SeedSequence((*seed, episode)) for episode in range(episodes)]
    policies = list(policies)
    shown = log.progress(len(policies), f"{name}, {episodes} episodes each", over=policies, unit="policy")
    returns = [[locomotion.rollout(env, policy, one)["rewards"].sum() for one in seeds] for policy in shown]
    return np.array(returns, np.float32)


def main(argv: list[str]) -> None:
    del argv
    settings = flags.read(Settings())
    chosen = run(settings)
    for index, (step, returns) in enumerate(zip(chosen.steps, chosen.returns, strict=True)):
        name = {chosen.card["medium"]: "medium", chosen.card["expert"]: "expert"}.get(index, "")
        print(
            f"{step:>9,} steps: return {returns.mean():8.1f}, standard deviation {returns.std():7.1f}  {name}"
        )
    print(f"{settings.out}: {Path(settings.out).stat().st_size:,} bytes")


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
