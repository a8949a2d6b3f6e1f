"""`experiments.goals`: from logged trajectories to how often the goals of each task are reached."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import point_mass  # noqa: F401  (registers its environment)
import pytest
import toy_environments
from gymnasium.spaces import Box, Discrete
from test_data_ogbench import write as write_ogbench
from test_experiments import arguments, assert_same_bits, end, files, state, two_processes

from experiments import checks, common, goals, trained
from rl import acting, agents, checkpoint, log, run_folder, shard
from rl.agents import gcbc, hecrl
from rl.envs import two_rooms
from rl.networks import entity
from rl.replay.goals import Goals, Hindsight, conditioned_spec
from rl.types import Spec, State

TINY: dict[str, Any] = {
    "agent": "gcivl",
    "seeds": 2,
    "updates": 6,
    "eval_every": 2,
    "eval_episodes": 2,
    "eval_processes": 0,
    "batch_size": 8,
    "tensorboard": False,
}


EVEN = Hindsight(value=Goals(geometric=False))  # distances that need no discount


def settings(folder: Path, **changes: Any) -> goals.Settings:
    return goals.Settings(**TINY | {"workdir": str(folder)} | changes)


def config(agent: str = "gcivl", **changes: Any) -> Any:
    small = {"latent": 8} if agent in ("crl", "qrl") else {}
    return agents.get(agent).Config(**{"hidden": (8,), **small, **changes})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("goals")
    return folder, goals.run(settings(folder), config())


@pytest.mark.slow
@pytest.mark.command
def test_a_run_says_how_often_each_task_is_reached(
    uninterrupted: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Episodes take turns with tasks, all in the environment of the data; the score is of the last evaluations."""
    folder, returned = uninterrupted
    result = json.loads((folder / log.RESULT).read_text())
    assert result["action_size"] == 2
    assert result["environment"] == "goals/TwoRooms-v0" and result["support"] == pytest.approx([-100, 0])
    success = np.array([row["eval/success"] for row in log.read(folder)])  # [T, S, episodes]
    assert success.shape == (3, 2, 2 * 5)
    rates = result["reached"]
    assert rates["updates"] == [2, 4, 6] and [*rates["tasks"]] == [*(f"task{i}" for i in range(1, 6)), "all"]
    for task in range(5):
        each = success[:, :, task::5].mean((0, 2))
        np.testing.assert_allclose(rates["tasks"][f"task{task + 1}"]["each"], each)
    np.testing.assert_allclose(rates["tasks"]["all"]["each"], success.mean((0, 2)))
    rows = log.read(folder)
    assert all(np.isfinite(row["train/value_loss"]).all() for row in rows)
    held_out = np.array([row["validation/value_loss"] for row in rows])
    assert held_out.shape == (3, 2) and len(np.unique(held_out)) == 6
    assert (folder / "curve.png").exists()
    goals.show(returned)
    table = capsys.readouterr().out
    assert "| task5 |" in table and f"| all | {success.mean():.3f} [" in table


@pytest.mark.slow
@pytest.mark.command
def test_a_longer_run_goes_on_from_a_shorter_one_to_the_same_bits(
    uninterrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    goals.run(settings(tmp_path, updates=4), config())
    goals.run(settings(tmp_path), config())
    assert_same_bits(uninterrupted[0], tmp_path, 6)


@pytest.mark.slow
@pytest.mark.command
def test_a_finished_run_is_drawn_and_stays_as_it_was(
    uninterrupted: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, returned = uninterrupted
    before = files(folder)
    again = goals.run(settings(folder, render=1), config())
    after = files(folder)
    assert after.keys() - before.keys() == {str(folder / f"rollouts/task{i}.png") for i in range(1, 6)}
    assert all(after[path] == content for path, content in before.items())
    assert again["reached"].keys() == returned["reached"].keys()
    assert capsys.readouterr().err.count("drawn: ") == 5


@pytest.mark.slow
@pytest.mark.command
def test_trained_policies_are_played_on_each_task_again(
    uninterrupted: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose checkpoint does not say where it was evaluated is played by its result.

    That policies act as in their run is seen where they have learned something, in the last test of this file.
    """
    folder, _ = uninterrupted
    policies = trained.load(folder)
    assert policies.environment == "goals/TwoRooms-v0" and policies.count == 2
    for name in ("TwoRooms-v0", policies.environment):  # tested by the same protocol
        assert trained.load(folder, name).environment == policies.environment
    (path,) = folder.glob("checkpoints/6/card.json")
    card = json.loads(path.read_text())["card"]
    assert card.pop("environment") == trained.run_environment(card, folder) == policies.environment
    chosen = trained.Settings(run=str(folder), episodes=2, eval_processes=0)
    played = trained.scores(policies, chosen)
    assert played["success"].shape == (2, 2 * 5)
    played["success"] = np.tile([0.0, 0.0, 0.0, 0.0, 1.0], (2, 2))
    trained.show(policies, played, chosen)
    printed = capsys.readouterr().out
    assert "success of task 4: 0, " in printed and "success of task 5: 1, " in printed
    assert "2 new episodes of goals/TwoRooms-v0, of each of its 5 tasks, for each of 2 policies" in printed


def test_only_the_last_three_evaluations_count(tmp_path: Path) -> None:
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        for step, score in enumerate((0.0, 1.0, 1.0, 0.0)):
            record.write(step, {"eval/success": np.full((2, 10), score) * np.tile([1, 1, 1, 1, 0], 2)})
    rates = goals.reached(settings(tmp_path), tmp_path, "goals/TwoRooms-v0")
    np.testing.assert_array_equal(rates["updates"], [1, 2, 3])
    assert rates["tasks"]["task1"]["mean"] == pytest.approx(2 / 3) and rates["tasks"]["task5"]["mean"] == 0
    assert rates["tasks"]["all"]["mean"] == pytest.approx(8 / 15)
    # All lines were lost, and the run is to be summed up all the same.
    (tmp_path / log.METRICS).write_text("")
    assert goals.reached(settings(tmp_path), tmp_path, "goals/TwoRooms-v0") == {}


def test_tasks_are_counted_apart_for_every_variant_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        record.write(1, {"eval/success": np.repeat([0.0, 0.0, 1.0, 1.0], 10).reshape(4, 10)})
    chosen = settings(tmp_path)
    variants = [
        {
            "parameters": {"alpha": alpha},
            "scores": {},
            "reached": goals.reached(chosen, tmp_path, "goals/x", i, 2),
        }
        for i, alpha in enumerate((0.1, 3.0))
    ]
    assert [one["reached"]["tasks"]["all"]["mean"] for one in variants] == [0.0, 1.0]
    goals.show({"settings": {"protocol": "ogbench"}, "variants": variants, "folder": str(tmp_path)})
    table = capsys.readouterr().out
    assert "| goals | success, one evaluation [95 % interval] |" in table  # fewer than a score is the mean of
    assert "| alpha=0.1: task5 | 0.000 [" in table and "| alpha=3: all | 1.000 [" in table


@pytest.mark.slow
@pytest.mark.command
def test_the_other_protocol_counts_goals_that_are_held_to_the_end(tmp_path: Path) -> None:
    result = goals.run(settings(tmp_path, protocol="hecrl", updates=2), config())
    (row,) = log.read(tmp_path)
    np.testing.assert_array_equal(row["eval/length"], np.full((2, 2), two_rooms.LIMIT))
    assert "eval/success" not in row and result["environment"] == "random-goals/TwoRooms-v0"
    assert [*result["reached"]["tasks"]] == ["all"]
    np.testing.assert_array_equal(
        result["reached"]["tasks"]["all"]["each"], np.mean(row["eval/final_success"], 1)
    )
    policies = trained.load(tmp_path)
    played = trained.scores(policies, trained.Settings(episodes=2, eval_processes=0), 1)
    assert policies.environment == "random-goals/TwoRooms-v0" and "success" not in played
    np.testing.assert_array_equal(played["final_success"], row["eval/final_success"])


class Silent(two_rooms.TwoRooms):
    """Two rooms whose steps do not say whether the goal is reached."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        return *super().step(action)[:4], {}


gymnasium.register("Silent-v0", Silent, max_episode_steps=2)


def test_an_environment_that_does_not_say_what_is_reached_is_refused_by_the_first_evaluation(
    tmp_path: Path,
) -> None:
    """And not at the end of the run, by a metric that nobody has logged."""
    chosen = settings(tmp_path, environment="Silent-v0")
    task, mesh = goals.problem(chosen, config(), [config()]), shard.mesh(1, 1)
    stay = acting.memoryless(lambda state, observation, key: jnp.zeros_like(observation["goal"]))
    with (
        goals.scorer(chosen, task, SimpleNamespace(actor=stay), 1, mesh) as score,  # type: ignore[arg-type]
        pytest.raises(ValueError, match=r"Silent-v0 does not say whether .*--environment"),
    ):
        score(State({}, {}, {}, jnp.zeros(())), 1)


@pytest.mark.slow
def test_a_policy_of_two_cubes_is_played_among_three_but_not_on_other_scenes(tmp_path: Path) -> None:
    """What sets are for: nothing but the number of entities may differ."""
    path = write_ogbench(tmp_path / "cube-double-play-v0.npz", observation=37, action=5)
    network = entity.Shape(width=8, inner=8, heads=1, layers=1)
    tiny = hecrl.Config(subgoals="none", ids=9, network=network)
    tiny = dataclasses.replace(tiny, goals=dataclasses.replace(tiny.goals, subgoal_steps=2))
    chosen = settings(
        tmp_path / "run",
        agent="hecrl",
        dataset=f"{path}+entities",
        environment="cube-double-v0+entities",
        eval_episodes=0,
    )
    task = goals.problem(chosen, tiny, [tiny])
    three = conditioned_spec(Spec((4, 15), 5))
    checks.fit(task.data.loaded, three, sets=True)
    for sets, other in ((False, three), (True, conditioned_spec(Spec((4, 16), 5)))):
        with pytest.raises(ValueError, match="does not fit the data"):
            checks.fit(task.data.loaded, other, sets=sets)
    population, keys = goals.learners(chosen, tiny, {}, task, shard.mesh(1, 1))
    shapes = jax.eval_shape(population.init, keys, goals.example(chosen, tiny, task.trajectories))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)  # as of a run
    run = goals._run(chosen, tiny, {}, task)
    checkpoint.save(run.folder / run_folder.CHECKPOINTS, 1, {"state": state}, {**run.about, **run.card})
    policies = trained.load(run.folder, "cube-triple-v0+entities")
    assert policies.spec.observation_shape["observation"] == (4, 15)


def test_integer_actions_are_those_of_the_environment(tmp_path: Path) -> None:
    """Of 5 actions 2 were logged."""
    spaces = {"observation_space": Box(-1, 1, (8,)), "action_space": Discrete(5)}
    gymnasium.register("FiveGoals-v0", toy_environments.Spaces, kwargs=spaces)
    chosen = settings(tmp_path, agent="gcbc", dataset="synthetic-discrete", environment="FiveGoals-v0")
    size = lambda **changes: (
        goals.problem(
            dataclasses.replace(chosen, **changes), config("gcbc"), [config("gcbc")]
        ).data.loaded.spec.action_size
    )
    assert size() == 5 and size(eval_episodes=0) == 2
    checkpoint.save(tmp_path / run_folder.CHECKPOINTS, 1, {"x": np.zeros(1)}, {"action_size": 3})
    assert size() == 3  # a run that has begun keeps its own


@pytest.mark.parametrize(
    ("agent", "changes", "own", "message"),
    [
        ("iql", {}, {}, "--agent=iql learns from rewards .* python -m experiments.offline; .* crl, gcbc"),
        ("crl", {"head": "hl_gauss"}, {}, "--head=hl_gauss: crl regresses no value"),
        ("gcivl", {"protocol": "mine"}, {}, "--protocol='mine': choose one of ogbench, hecrl"),
        (
            "gcivl",
            {"split_data": True},
            {},
            "--split_data: goals are later states .* other devices would hold",
        ),
        ("gcivl", {"render": 21}, {}, "--render=21 must lie between 0 and 20"),
        ("gcivl", {"eval_episodes": 1}, {}, "--eval_episodes=1: give 0 for none or at least 2"),
        ("gcivl", {"environment": "point_mass:PointMass-v0"}, {}, "has no goals: .*--environment"),
        ("gcivl", {"environment": "cube-single-singletask-v0"}, {}, "one goal, .* python -m experiments.off"),
        (
            "gcivl",
            {"dataset": "synthetic-continuous", "environment": "TwoRooms-v0"},
            {},
            "does not fit the data",
        ),
        ("gcivl", {}, {"discount": 1.0, "goals": EVEN}, "--agent.discount=1.0 must be below 1"),
        ("gcivl", {}, {"goals": Hindsight(value=Goals(0.5, 0.5, 0.5))}, "--agent.goals.value: probab"),
        ("hiql", {}, {"goals": Hindsight(subgoal_steps=100)}, "subgoal_steps=100 is longer than every"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_touched(
    agent: str, changes: dict[str, Any], own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / log.CONFIG).write_text('{"config": {}, "resumed": []}')  # as of a run
    before = files(tmp_path)
    with pytest.raises(ValueError, match=message):
        goals.run(settings(tmp_path, agent=agent, overwrite=True, **changes), config(agent, **own))
    assert files(tmp_path) == before


def test_held_out_data_that_are_too_short_are_named_and_can_be_left_out(tmp_path: Path) -> None:
    for name, length in {"log.npz": 100, "log-val.npz": 15}.items():
        rows = {"observations": np.zeros((length, 2)), "actions": np.zeros((length, 2))}
        np.savez(tmp_path / name, **rows, terminals=np.arange(length) == length - 1)
    chosen, of_agent = settings(tmp_path, agent="hiql", dataset=str(tmp_path / "log.npz")), config("hiql")
    with pytest.raises(ValueError, match=r"held-out data of .* most 1\d steps .*--validation=false"):
        goals.problem(chosen, of_agent, [of_agent])
    without = dataclasses.replace(chosen, validation=False)
    assert goals.problem(without, of_agent, [of_agent]).validation is None


def test_an_environment_without_goals_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "run", lambda *_, **__: pytest.fail("begun"))
    with pytest.raises(ValueError, match="environment 'point_mass:PointMass-v0' has no goals"):
        goals.run(settings(tmp_path, environment="point_mass:PointMass-v0"), config())


def test_an_agent_of_ones_own_must_say_by_which_gamma_goals_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, own = settings(Path(), agent="mine"), SimpleNamespace(goals=Hindsight())
    monkeypatch.setattr(agents, "get", lambda name: SimpleNamespace())
    with pytest.raises(
        ValueError, match=r"drawn by discounted distances, .* --agent=mine has no field discount"
    ):
        goals.check_agent(chosen, own)
    monkeypatch.setattr(agents, "get", lambda name: SimpleNamespace(IGNORES_REWARDS=True))
    goals.check_agent(chosen, own)


class Begun(Exception):
    """Training would begin."""


@pytest.mark.parametrize("episodes", [0, 2])
def test_a_run_without_an_environment_says_so_before_it_trains(
    episodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: Any) -> Any:
        raise Begun

    monkeypatch.setattr(goals, "scorer", begin)
    with pytest.raises(Begun):
        goals.run(settings(tmp_path, dataset="synthetic-continuous", eval_episodes=episodes), config())
    said = "note: synthetic-continuous names no environment" in capsys.readouterr().err
    assert said == bool(episodes)


def test_a_sweep_of_discounts_is_refused(tmp_path: Path) -> None:
    """Geometric goals would be drawn by one discount for all."""
    with pytest.raises(
        ValueError, match="sweep of discount: all runs of one program draw their goals by one"
    ):
        goals.run(settings(tmp_path / "run"), config(), {"discount": [0.9, 0.99]})


@pytest.mark.long
@pytest.mark.optimised
@pytest.mark.parametrize(("agent", "least"), [("gcivl", 0.7), ("hiql", 0.7)])
def test_an_agent_learns_to_go_through_the_door(agent: str, least: float, tmp_path: Path) -> None:
    """Behaviour cloning of the walks, which had other goals on their way, reaches fewer."""
    chosen = settings(
        tmp_path / agent, agent=agent, updates=6000, eval_every=1000, eval_episodes=20, batch_size=256
    )
    plain = gcbc.Config(hidden=(64, 64), learning_rate=1e-3)
    agent_config = config(agent, hidden=(64, 64), learning_rate=1e-3, discount=0.95)
    score = goals.run(chosen, agent_config)["reached"]["tasks"]["all"]["mean"]
    cloned = goals.run(dataclasses.replace(chosen, agent="gcbc", workdir=str(tmp_path / "gcbc")), plain)
    assert score > max(least, cloned["reached"]["tasks"]["all"]["mean"] + 0.1)
    twenty = trained.Settings(episodes=20, eval_processes=0)
    played = trained.scores(trained.load(tmp_path / agent), twenty, 6)
    np.testing.assert_array_equal(played["length"], log.read(tmp_path / agent)[-1]["eval/length"])


@pytest.mark.long
def test_two_processes_of_two_devices_train_and_evaluate_what_one_does(tmp_path: Path) -> None:
    """As on two hosts that share each batch: CRL compares rows that lie on both. What they began, one continues."""
    chosen = settings(tmp_path / "two", agent="crl", mesh_data=4)
    processes = two_processes(
        *arguments(chosen, "--agent.hidden=8", "--agent.latent=8"), module="experiments.goals"
    )
    try:
        ends = [end(process) for process in processes]
    finally:
        processes[1].kill()
    assert [code for code, _, _ in ends] == [0, 0], ends
    (_, first, _), (_, second, _) = ends
    assert "| task5 |" in first and "| task5 |" not in second  # one of them evaluates and speaks
    hardware = json.loads((tmp_path / "two" / log.RESULT).read_text())["hardware"]
    assert (hardware["processes"], hardware["devices"]) == (2, 4)

    for name in ("one", "two"):
        goals.run(settings(tmp_path / name, agent="crl", updates=8), config("crl"))
    one, two = state(tmp_path / "one", 8), state(tmp_path / "two", 8)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=2e-4, atol=1e-6, err_msg=name)
    for name in ("train/contrastive_loss", "validation/contrastive_loss", "eval/success"):
        steps, values = log.series(tmp_path / "two", name)
        assert steps.tolist() == [2, 4, 6, 8]
        np.testing.assert_allclose(values, log.series(tmp_path / "one", name)[1], rtol=1e-3, err_msg=name)


def test_an_agent_without_subgoals_takes_episodes_that_are_too_short_for_one(tmp_path: Path) -> None:
    config = dataclasses.replace(hecrl.Config(), subgoals="none")
    assert goals.hindsight(settings(tmp_path, agent="hecrl"), config).subgoal_steps == 0
    assert goals.hindsight(settings(tmp_path, agent="hecrl"), hecrl.Config()).subgoal_steps == 50
