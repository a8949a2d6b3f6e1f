"""experiments.trained: a run's policies act again as they did in the run's own evaluations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import point_mass  # noqa: F401  (registers its environment)
import pytest
import toy_environments
from gymnasium.spaces import Box, Discrete

from experiments import common, offline, online, rollouts, trained
from rl import acting, agents, checkpoint, data, envs, fitted_q, log, train
from rl.replay import transform
from rl.types import Spec

POINT_MASS = "point_mass:PointMass-v0"
TINY = {"seeds": 2, "batch_size": 8, "eval_episodes": 3, "eval_processes": 0, "tensorboard": False}


def config(agent: str, **changes: Any) -> Any:
    return agents.get(agent).Config(hidden=(8, 8), **changes)


def last(folder: Path) -> dict[str, Any]:
    """The last line of a run's metrics."""
    return log.read(folder)[-1]


def again(folder: Path, index: int, **changes: Any) -> np.ndarray:
    """The returns of the evaluation of that number, played once more."""
    chosen = trained.Settings(str(folder), episodes=3, eval_processes=0, **changes)
    return trained.scores(trained.load(folder), chosen, index)["return"]


@pytest.mark.slow
def test_an_offline_run_of_a_sweep_in_chunks_acts_again_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a support, standardised observations, chunks of actions and two variants: all that acting depends on."""
    folder = tmp_path / "run"
    chosen = offline.Settings(
        agent="iql",
        dataset="synthetic-continuous",
        environment=POINT_MASS,
        head="hl_gauss",
        head_sigma=2.0,  # candidates are chosen by values, which depend on it
        normalize_observations=True,
        chunk=2,
        updates=4,
        eval_every=2,
        workdir=str(folder),
        **TINY,
    )
    result = offline.run(chosen, config("iql", candidates=3), {"expectile": [0.6, 0.9]})
    assert result["reference"] is None  # as that of the data
    expected = np.asarray(last(folder)["eval/return"])
    assert expected.shape == (4, 3)
    np.testing.assert_array_equal(again(folder, 2), expected)
    assert (again(folder, 0) != expected).any() and (again(folder, 2, seed=1) != expected).any()

    policies = trained.load(folder)
    env, act, total = envs.make(POINT_MASS), trained.player(policies, member=1), 0.0
    observation, _ = env.reset(seed=0)
    for step in range(5):
        action = act(observation, first=step == 0)
        assert action.shape == (policies.spec.action_size,) and np.abs(action).max() <= 1
        observation, reward, *_ = env.step(action)
        total += reward
    env.close()
    assert np.isfinite(total)
    with pytest.raises(ValueError, match="member=4, but the run has 4 policies, counted from 0"):
        trained.player(policies, member=4)
    # Each acts as all do together, by the same draws, and its state alone is looked at.
    shown = np.stack([observation] * 4)[:, None]
    memory, keys = policies.actor.start(policies.state, shown), jax.random.split(jax.random.key(0))
    first = np.full((4, 1), True)
    drawn = jax.random.split(keys[1], 4)
    together, _ = policies.actor.act(policies.state, memory, shown, first, drawn)
    each = [trained.player(policies, member)(observation, first=True) for member in range(4)]
    np.testing.assert_allclose(each, together[:, 0], rtol=1e-5, atol=1e-6)
    assert len(np.unique(each, axis=0)) == 4
    number = policies._replace(
        alone=lambda member: (0, acting.memoryless(lambda state, seen, key: jnp.ones(1, int)))
    )
    assert {1: "found"}[
        trained.player(number)(observation, first=True)
    ]  # as of actions that an environment looks up
    alone = [x.shape for x in jax.tree.leaves(policies.alone(3)[0].params)]
    assert alone == [x.shape[1:] for x in jax.tree.leaves(policies.state.params)]
    # The first seed of each variant is drawn, if asked for.
    filmed: list[Any] = []
    monkeypatch.setattr(rollouts, "film", lambda *arguments, **_: filmed.append(arguments) or [])
    for count in (0, 2):
        trained.render(policies, trained.Settings(str(folder), render=count))
    assert [(of[0].name, of[4]) for of in filmed] == [("expectile=0.6", 2), ("expectile=0.9", 2)]
    for (_, state, *_), member in zip(filmed, (0, 2), strict=True):
        jax.tree.map(np.testing.assert_array_equal, state.params, policies.alone(member)[0].params)
    # Critics see the same, and say the value of a chunk.
    task = offline.problem(chosen, [config("iql")])
    learner = common.learner("iql", config("iql"), task.loaded.spec, task.head, chunk=2)
    rng = np.random.default_rng(0)
    states, actions = (
        rng.normal(5, 1, (3, 4)).astype(np.float32),
        rng.uniform(-1, 1, (3, 4)).astype(np.float32),
    )
    values = policies.critics(states, actions)
    assert values.shape == (4, 2, 3)
    second = train.member(policies.state, 1)
    expected = learner.critics(second, transform.observations(task.transform, states), actions)
    np.testing.assert_allclose(values[1], expected, rtol=1e-5)
    np.testing.assert_allclose(policies.critics(states[0], actions[0]), values[..., 0], rtol=1e-5)
    assert policies.labels == ("expectile=0.6", "expectile=0.9")
    assert repr(policies) == f"Policies({POINT_MASS}, 4 policies, step 4)"
    with pytest.raises(
        ValueError,
        match=rf"--environment=Pendulum-v1 has observations of .*trained in {POINT_MASS}, which has",
    ):
        trained.load(folder, "Pendulum-v1")
    with pytest.raises(ValueError, match=f"--run={tmp_path}: .* runs below it are {folder}"):
        trained.load(tmp_path)

    # As the data name the environment, and the run is not finished.
    (folder / log.RESULT).unlink()
    (path,) = folder.glob("checkpoints/4/card.json")
    record = json.loads(path.read_text())
    record["card"]["settings"]["environment"] = ""
    path.write_text(json.dumps(record))
    assert trained.load(folder).environment == POINT_MASS
    del record["card"]["environment"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not say where it was evaluated: give --environment"):
        trained.load(folder)


@pytest.mark.slow
def test_estimates_of_a_finished_run_are_those_of_its_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The only check that the data, the head, the keys and the policies of a folder are those that training had.

    And that seeds have the same keys in every variant.
    """
    folder, narrow = tmp_path / "run", fitted_q.estimator
    monkeypatch.setattr(
        fitted_q, "estimator", lambda *of, **_: narrow(*of[:3], dataclasses.replace(of[3], hidden=(8,)))
    )
    chosen = offline.Settings(
        agent="iql",
        dataset="synthetic-continuous",
        head="hl_gauss",
        head_size=21,
        normalize_observations=True,
        reward_scale="2",
        policy_estimates=5,
        updates=6,
        eval_every=3,
        seed=1,
        workdir=str(folder),
        **TINY,
    )
    sweep = {"learning_rate": [0.001, 0.03, 0.03]}
    offline.run(dataclasses.replace(chosen, eval_episodes=0), config("iql", discount=0.9), sweep)
    expected = np.asarray(last(folder)["eval/fitted_q"])
    asked = trained.Settings(str(folder), policy_estimates=5)
    found = trained.estimates(asked)
    values = [variant["fitted_q"]["per_seed"] for variant in found["variants"]]
    assert len(np.unique(expected)) == 4
    np.testing.assert_array_equal(expected[2:4], expected[4:])
    np.testing.assert_array_equal(np.concatenate(values), expected)
    assert (found["step"], found["variants"][1]["parameters"]) == (6, {"learning_rate": 0.03})
    trained.show_estimates(found)
    assert f"learning_rate=0.03: fitted_q: {expected[2:4].mean():.4g}; each: " in capsys.readouterr().out

    others = dataclasses.replace(asked, dataset="synthetic-discrete")
    with pytest.raises(ValueError, match="was trained on other data than synthetic-discrete has here"):
        trained.estimates(others)
    (path,) = folder.glob("checkpoints/6/card.json")
    record = json.loads(path.read_text())
    for name, changes, message in (
        ("settings", {"chunk": 4}, "--policy_estimates=5 and --chunk=4 cannot be combined"),
        ("sweep", {"discount": [0.9, 0.8]}, "--policy_estimates compares policies by one discount"),
        ("settings", {"protocol": ""}, f"--run={folder} is no run of experiments.offline"),
    ):
        card = record["card"] | {name: record["card"][name] | changes}
        path.write_text(json.dumps(record | {"card": card}))
        with pytest.raises(ValueError, match=message):
            trained.estimates(asked)


@pytest.mark.slow
def test_a_log_without_the_largest_integer_actions_trains_what_can_be_played(tmp_path: Path) -> None:
    """Of 5 actions 2 were logged. A run that began with these, and does not say so, goes on with them."""
    spaces = {"observation_space": Box(-1, 1, (8,)), "action_space": Discrete(5)}
    gymnasium.register("Five-v0", toy_environments.Spaces, max_episode_steps=3, kwargs=spaces)
    logged = data.load("synthetic-discrete", environment="Five-v0")
    assert logged.spec == Spec((8,), 2, discrete=True)
    chosen = offline.Settings(
        agent="dqn",
        dataset="synthetic-discrete",
        environment="Five-v0",
        updates=2,
        eval_every=2,
        workdir=str(tmp_path),
        **TINY,
    )
    result = offline.run(chosen, config("dqn"))
    assert result["action_size"] == 5
    np.testing.assert_array_equal(again(tmp_path, 1), np.zeros((2, 3)))
    (path,) = tmp_path.glob("checkpoints/2/card.json")
    record = json.loads(path.read_text())
    assert common.all_actions(chosen, logged, tmp_path).spec.action_size == 5
    del record["card"]["action_size"]
    path.write_text(json.dumps(record))
    assert common.all_actions(chosen, logged, tmp_path).spec.action_size == 2
    record["card"]["action_size"] = 2
    path.write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match=r"the 2 actions of its log, here there are 5; .* --environment=NAME"
    ):
        trained.load(tmp_path)
    blind = dataclasses.replace(chosen, eval_episodes=0)
    assert common.all_actions(blind, logged, tmp_path / "new").spec.action_size == 2


def test_actions_that_are_numbered_as_in_the_environment_are_refused(tmp_path: Path) -> None:
    spaces = {"observation_space": Box(-1, 1, (8,)), "action_space": Discrete(4, start=1)}
    gymnasium.register("FromOne-v0", toy_environments.Spaces, max_episode_steps=3, kwargs=spaces)
    logged = data.load("synthetic-discrete", environment="FromOne-v0")  # 0 and 1
    chosen = offline.Settings(dataset="my.hdf5", environment="FromOne-v0", **TINY)
    shifted = logged.dataset.transitions._replace(action=logged.dataset.transitions.action + 1)
    theirs = logged._replace(
        dataset=logged.dataset._replace(transitions=shifted), spec=logged.spec._replace(action_size=3)
    )
    with pytest.raises(
        ValueError, match=r"--dataset=my.hdf5: its smallest action is 1, .* write actions minus 1"
    ):
        common.all_actions(chosen, theirs, tmp_path)
    assert common.all_actions(chosen, logged, tmp_path).spec.action_size == 4
    minari = dataclasses.replace(chosen, dataset="minari:mine/log-v0")  # of which the reader has subtracted 1
    assert common.all_actions(minari, theirs, tmp_path).spec.action_size == 4


@pytest.mark.slow
def test_an_online_run_acts_again_as_it_did(tmp_path: Path) -> None:
    chosen = online.Settings(
        agent="td3",
        env=POINT_MASS,
        steps=40,
        eval_every=20,
        save_every=20,
        learning_starts=10,
        replay=40,
        workdir=str(tmp_path),
        **TINY,
    )
    online.run(chosen, config("td3"))
    np.testing.assert_array_equal(again(tmp_path, 2), last(tmp_path)["eval/return"])


def test_returns_are_normalised_as_the_runs_were(tmp_path: Path) -> None:
    """By the numbers of its data; of a run that does not say them, by D4RL's, if it logged such scores."""
    hopper = lambda card, name="Hopper-v5": trained.reference(tmp_path, card, name, "Hopper-v5")
    assert hopper({}) is None
    (tmp_path / log.METRICS).write_text('{"step": 1, "eval/normalized_return": [[1.0]]}\n')
    assert hopper({}, "Hopper-v4") == pytest.approx((-20.272305, 3234.3))
    assert hopper({}, POINT_MASS) is None
    assert hopper({"reference": [1.0, 2.0]}) == hopper({"reference": [1.0, 2.0]}, "Hopper-v4") == (1.0, 2.0)
    assert hopper({"reference": [1.0, 2.0]}, "Walker2d-v5") is hopper({"reference": None}) is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--run={tmp_path}: there is no checkpoint"):
        trained.load(tmp_path)
    card = {"agent": "ilql", "settings": {"sweep": "", "seeds": 1}}  # as of experiments.language
    checkpoint.save(tmp_path / "checkpoints", 1, {"x": np.zeros(1)}, card)
    with pytest.raises(
        ValueError, match=r"is no run of experiments\.offline, online, goals, model_based or mbpo"
    ):
        trained.load(tmp_path)
