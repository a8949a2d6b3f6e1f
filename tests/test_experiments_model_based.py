"""experiments.model_based: whole runs on a small log of Pendulum-v1, resumption, and wrong settings."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import common, trained
from experiments import model_based as script
from rl import checkpoint, data, envs, keys, locks, log, model_based
from rl.dynamics import ensemble, termination
from rl.networks.layers import Architecture
from rl.types import Spec

SMALL = {"rollouts": 8, "length": 3, "updates": 4, "batch_size": 20, "real": 0.2, "hidden": (8,)}


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of one episode by random actions."""
    h5py = pytest.importorskip("h5py")
    env, rng = envs.make("Pendulum-v1", seed=0), np.random.default_rng(0)
    observation, rows = env.reset()[0], []
    for _ in range(120):
        action = rng.uniform(-1, 1, 1).astype(np.float32)
        following, reward, *_ = env.step(action)
        rows.append((observation, action, reward, following))
        observation = following
    observations, actions, rewards, successors = map(np.asarray, zip(*rows, strict=True))
    path = tmp_path_factory.mktemp("log") / "pendulum.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"], file["rewards"] = observations, actions, rewards
        file["next_observations"] = successors
        file["terminals"] = np.zeros(120, bool)
        file["timeouts"] = np.arange(120) == 119
    return path


@pytest.fixture(autouse=True)
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = lambda **fields: REAL(**fields, members=3, elites=2)
    REAL = ensemble.Config
    monkeypatch.setattr(ensemble, "Config", tiny)


def settings(path: Path, workdir: Path, **fields: Any) -> script.Settings:
    return script.Settings(
        **{
            "dataset": str(path),
            "environment": "Pendulum-v1",
            "model_hidden": (8,),
            "model_decay": (0.0,),
            "model_updates": 20,
            "seeds": 2,
            "epochs": 2,
            "eval_every": 1,
            "eval_episodes": 2,
            "eval_processes": 0,
            "tensorboard": False,
            "workdir": str(workdir),
        }
        | fields
    )


def config(method: str = "base", **fields: Any) -> script.Config:
    return dataclasses.replace(script.config(method), **SMALL | fields)


def without_fit(make: Callable[..., ensemble.Ensemble]) -> Callable[..., ensemble.Ensemble]:
    """Ensembles that have learned what they know."""

    def fit(*_: Any) -> None:
        raise AssertionError("a model was fitted")

    return lambda *arguments: make(*arguments)._replace(fit=fit)


@pytest.mark.long
def test_a_run_leaves_scores_and_diagnoses_and_resumes_to_the_same_bits(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world half-way between the learned one and the truth.

    Of the run whose epochs were made one by one, both were: an epoch after the fit, and one after that epoch.
    """
    cut, fitted = tmp_path / "cut", tmp_path / "fitted"
    script.run(settings(pendulum, cut, truth=0.5, epochs=1), config())
    (cut / "result.json").unlink()
    shutil.copytree(cut, fitted)
    shutil.rmtree(fitted / "checkpoints" / "4")  # as if it had been killed right after the fit
    monkeypatch.setattr(ensemble, "make", without_fit(ensemble.make))
    ends = [script.run(settings(pendulum, folder, truth=0.5), config()) for folder in (cut, fitted)]
    assert np.isfinite(ends[0]["scores"]["return"]["last"]["mean"]) and ends[0]["updates"] == 8
    rows = log.read(cut)
    assert log.read(fitted) == rows
    with pytest.raises(ValueError, match="holds a run of 2 epochs, more than --epochs=1"):
        script.run(settings(pendulum, cut, truth=0.5, epochs=1), config())
    with pytest.raises(checkpoint.CheckpointError, match=r"settings\.seed: 0 in the checkpoint, 1 in this"):
        script.run(settings(pendulum, cut, truth=0.5, seed=1), config())
    assert {"train/edge_share", "train/reward_error", "train/spread_aleatoric", "eval/return"} <= set(
        rows[-1]
    )
    assert script.run(settings(pendulum, cut, truth=0.5), config())["updates"] == 8  # finished
    policies = trained.load(cut)
    played = trained.scores(policies, trained.Settings(episodes=2, eval_processes=0), 2)
    np.testing.assert_array_equal(played["return"], rows[-1]["eval/return"])


@pytest.mark.slow
def test_the_truth_needs_no_model_and_makes_no_error(pendulum: Path, tmp_path: Path) -> None:
    chosen = settings(pendulum, tmp_path, truth=1.0, model_updates=0, seeds=1, eval_episodes=0)
    assert script.run(chosen, config())["scores"] == {}
    last = log.read(tmp_path)[-1]
    assert last["train/aleatoric"] == [0.0] and last["train/reward_error"][0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("truth", [-1.0, -0.5, 0.0, 0.5])
def test_worlds_lie_on_a_line(truth: float, pendulum: Path, tmp_path: Path) -> None:
    """-1 is the untrained network in the data's units; 0 the fitted one; each step of 1/2 is half-way."""
    chosen, agent_config = settings(pendulum, tmp_path, truth=truth), config()
    task = common.problem(chosen, [agent_config], script.target_range)
    run_keys = keys.seeds(jax.random.key(0), 2)
    network = script.make_ensemble(chosen, agent_config, task.loaded.spec)
    model = jax.vmap(network.init)(jax.random.split(jax.random.key(7), 2))._replace(mean=2 * np.ones((2, 4)))
    untrained_keys = keys.of(run_keys, "untrained_dynamics")
    untrained = jax.vmap(network.init)(untrained_keys)._replace(mean=2 * np.ones((2, 4)))
    world = script.world(chosen, agent_config, network, run_keys, "Pendulum-v1")
    first = jax.tree.map(lambda x: x[0], (world.params(model), model, untrained))
    observation, action = task.dataset.transitions.observation[:5], task.dataset.transitions.action[:5]
    mean = world.dynamics.predict(first[0], observation, action)[0]
    learned = network.dynamics.predict(first[1], observation, action)[0]
    useless = network.dynamics.predict(first[2], observation, action)[0]
    true = np.concatenate(
        [task.dataset.transitions.next_observation[:5], task.dataset.transitions.reward[:5, None]], -1
    )
    other = true if truth > 0 else useless
    np.testing.assert_allclose(mean, (1 - abs(truth)) * learned + abs(truth) * other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_stops_where_q_runs_away(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_based, "largest_value", lambda *_: model_based.Largest(-1e6, 0.0))
    with pytest.raises(model_based.RunawayQ, match="rewards and entropy allow at most -1e"):
        script.run(settings(pendulum, tmp_path, truth=1.0, seeds=1), config())


def test_without_a_model_no_rule_and_no_length_is_needed(pendulum: Path, tmp_path: Path) -> None:
    """SAC-N and EDAC start no rollouts; here in an environment that has no rule."""
    chosen = settings(pendulum, tmp_path, environment="MountainCarContinuous-v0")
    rule = script._rule(config("edac", real=1.0, length=10**6), chosen.environment, chosen.environment)
    assert not rule(np.ones((3, 2))).any()
    with pytest.raises(ValueError, match="no termination rule"):
        script._rule(config(), chosen.environment, chosen.environment)


def test_rollouts_beside_distractors_end_as_without_them() -> None:
    """As in `experiments.mbpo`: whatever a model says of the distractors."""
    name = "Hopper-v5+noise2"
    rule = script._rule(config(), name, name)
    assert not rule(np.array([1.2, 0.0, *[0.5] * 9, 1e3, np.nan]))


def test_data_of_an_unknown_task_have_a_remedy_on_the_command_line() -> None:
    with pytest.raises(
        ValueError, match=r"no termination rule for 'mine.hdf5'.*walker2d\. Give the --environment"
    ):
        script._rule(config(), "mine.hdf5", None)
    with pytest.raises(ValueError, match=r"--truth above 0 needs true dynamics: .*'Ant-v5'.* Leave it at 0"):
        script._truth("Ant-v5", needed=True)
    assert script._truth("Ant-v5", needed=False) is None


def test_the_truth_is_that_of_an_environment_and_not_of_a_file(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file called hopper.hdf5 is no name for gymnasium, which would ask for packages that the run does not need."""
    monkeypatch.setattr(script.truth, "of", lambda name: pytest.fail(f"asked for {name}"))
    folder = tmp_path / "plain"
    folder.mkdir()
    monkeypatch.chdir(pendulum.parent)
    reached = RuntimeError("rollouts would start")
    monkeypatch.setattr(model_based, "make", lambda *_, **__: (_ for _ in ()).throw(reached))
    with pytest.raises(RuntimeError, match="rollouts would start"):
        script.run(settings(Path(pendulum.name), folder, environment=""), config())
    with pytest.raises(ValueError, match="--truth above 0 needs true dynamics, and the data name no"):
        script.run(settings(Path(pendulum.name), folder, environment="", truth=0.5), config())


def test_results_without_checkpoints_are_in_the_way_before_the_fit(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.open_run(tmp_path, {}, tensorboard=False) as record:
        record.result({})
    monkeypatch.setattr(ensemble, "make", without_fit(ensemble.make))
    with pytest.raises(checkpoint.CheckpointError, match="a finished run without its checkpoints"):
        script.run(settings(pendulum, tmp_path), config())


def test_the_folder_is_held_while_the_model_is_fitted(
    pendulum: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two identical commands both fitted for hours, and then one was refused."""
    real, fits = ensemble.make, []

    def make(*arguments: Any) -> ensemble.Ensemble:
        def fit(*_: Any) -> None:
            fits.append(locks.holder(tmp_path))
            raise KeyboardInterrupt

        return real(*arguments)._replace(fit=fit)

    monkeypatch.setattr(ensemble, "make", make)
    with pytest.raises(KeyboardInterrupt):
        script.run(settings(pendulum, tmp_path, eval_episodes=2), config())
    assert len(fits) == 1 and (fits[0] or "").startswith("process ")
    assert locks.holder(tmp_path) is None and not (tmp_path / log.CONFIG).exists()


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"truth": 1.5}, {}, r"--truth=1.5 must be between -1 \(untrained\)"),
        ({"truth": 1.0}, {"real": 1.0}, "--truth=1.0: with --agent.real=1 nothing is rolled out"),
        (
            {"dataset": "cube-double-play-v0+entities"},
            {},
            r"--dataset=cube-double-play-v0\+entities: models .* leave \+entities out",
        ),
        ({"epochs": 0}, {}, "--epochs=0 must be at least 1"),
        ({"eval_episodes": 1}, {}, "--eval_episodes=1: give 0 for none or at least 2"),
        ({"runaway": -1.0}, {}, "--runaway=-1.0 must be a number that is not negative"),
        ({"runaway": float("nan")}, {}, "--runaway=nan must be a number"),
        ({"model_patience": 0}, {}, "^--model_patience=0 of the dynamics model must be at least 1"),
        (
            {"model_hidden": (8, 8), "model_decay": (0.0, 0.0)},
            {},
            r"^--model_decay=.* has 2 rates: give one for all, or .* each of the 2 layers of --model_hidden and",
        ),
        ({}, {"rollouts": 2}, "--agent.rollouts=2: .* give at least 3"),
        (
            {"model_deterministic": True},
            {"uncertainty": "aleatoric", "penalty": 1.0},
            "--model_deterministic predicts no deviation for --agent.uncertainty=aleatoric",
        ),
        ({"environment": "Hopper-v5"}, {}, "environment 'Hopper-v5' does not fit the data"),
        ({}, {"length": 201}, "--agent.length=201: episodes of Pendulum-v1 end after 200 steps"),
        ({"environment": "Reacher-v5", "truth": 1.0}, {}, "no true dynamics for 'Reacher-v5'"),
        (
            {"environment": "MountainCarContinuous-v0"},
            {},
            "no termination rule for 'MountainCarContinuous-v0'",
        ),
    ],
)
def test_wrong_settings_are_refused(
    fields: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    pendulum: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a model is fitted."""
    monkeypatch.setattr(ensemble, "make", without_fit(ensemble.make))
    with pytest.raises(ValueError, match=message):
        script.run(settings(pendulum, tmp_path, **fields), config(**changes))
    assert not list(tmp_path.iterdir())


def test_integer_actions_and_images_are_refused_with_agents_that_take_them(tmp_path: Path) -> None:
    """In the words of the flags: the method's own name, not that of the agent that it is made of."""
    integers = settings(Path("synthetic-discrete"), tmp_path, environment="")
    with pytest.raises(ValueError, match=r"--agent=edac .* cannot act by integers"):
        script.run(dataclasses.replace(integers, agent="edac"), config("edac", real=1.0))
    images = Spec((8, 8, 3), 1)
    with pytest.raises(
        ValueError, match=r"flat vectors, .*: --agent=edac needs no model in experiments.offline"
    ):
        script.make_ensemble(settings(Path("x"), tmp_path, agent="edac"), config("edac", real=1.0), images)


@pytest.mark.parametrize(
    ("fields", "changes", "flags"),
    [
        (
            {"agent": "edac", "model_updates": 77, "head_size": 7},
            {"real": 1.0, "length": 99},
            ["head_size", "model_updates", "agent.length"],
        ),
        (
            {"truth": 1.0, "model_updates": 77, "model_learning_rate": 1.0},
            {},
            ["model_updates", "model_learning_rate"],
        ),
        ({"model_updates": 77, "model_patience": 3}, {}, ["model_patience"]),
        ({"agent": "mopo", "truth": 1.0}, {"penalty": 2.0}, ["agent.penalty"]),
        ({"agent": "mopo", "truth": 1.0}, {}, []),  # the penalty is the method's own
        ({"agent": "ravl"}, {"network": Architecture(shift=4)}, ["agent.network.shift"]),
        ({"agent": "mobile", "truth": 1.0}, {"penalty": 2.0}, ["agent.penalty"]),
        (
            {"truth": -1.0, "model_max_epochs": 7, "model_deterministic": True},
            {},
            ["model_max_epochs"],
        ),
        ({"model_updates": 0, "model_patience": 3}, {}, []),
    ],
)
def test_flags_that_do_nothing_are_named(
    fields: dict[str, Any], changes: dict[str, Any], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = data.load("synthetic-continuous")._replace(note="these data have no environment")
    method = fields.get("agent", "base")
    chosen = script.Settings(
        agent=method, eval_episodes=2, **{name: x for name, x in fields.items() if name != "agent"}
    )
    of_agent = dataclasses.replace(script.config(method), **changes)
    script._print_notes(chosen, of_agent, loaded, termination.never)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "note: these data have no environment"
    if of_agent.real < 1:  # and rollouts would never end, while these data do
        assert lines.pop(0).startswith("note: by the termination rule 0 of ")
    named = [line.split()[1].removeprefix("--") for line in lines]
    assert sorted(named) == sorted(flags)


def test_a_run_goes_on_with_a_setting_that_it_did_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is as by default: it then does what was done without it."""
    new = "model_learning_rate"
    usual = script.Settings(workdir=str(tmp_path))
    known = {name: getattr(usual, name) for name in script.IDENTITY if name != new}
    monkeypatch.setattr(common, "_before", lambda place: {"settings": known})
    card = lambda chosen: common.run(chosen, config(), 1, task="x", identity=script.IDENTITY, card={}).card[
        "settings"
    ]
    assert card(usual) == known
    assert card(dataclasses.replace(usual, model_learning_rate=0.5)) == known | {new: 0.5}
    assert card(dataclasses.replace(usual, seeds=7)) == known | {"seeds": 7}


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown method 'iql': known are base, mopo"):
        script.config("iql")
