"""experiments.papers.vagram: its problems are those it describes, its verdicts can fail, and the study runs."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from experiments import studies
from experiments.papers import vagram as study
from experiments.papers import vagram_parts as parts
from rl import log
from rl.dynamics import loss as losses
from rl.dynamics import value_aware
from rl.dynamics.rows import Rows
from rl.envs import distractors, pendulum

# ---- the pendulum on a grid ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_of_the_grid_are_those_of_policy_iteration() -> None:
    """Of dense matrices in float64, solved exactly."""
    points = 9
    mdp = jax.tree.map(np.asarray, parts.grid(points))
    count, actions = mdp.reward.shape
    dense = np.zeros((count, actions, count))
    for state, action in itertools.product(range(count), range(actions)):
        np.add.at(dense[state, action], mdp.successor[state, action], mdp.transition[state, action])
    np.testing.assert_allclose(dense.sum(-1), 1, rtol=1e-5)
    policy = np.zeros(count, int)
    for _ in range(100):
        chosen = np.arange(count), policy
        value = np.linalg.solve(np.eye(count) - parts.GAMMA * dense[chosen], mdp.reward[chosen].astype(float))
        q = mdp.reward + parts.GAMMA * dense @ value
        if (q.argmax(1) == policy).all():
            break
        policy = q.argmax(1)
    # The last sweep changed nothing by more than 0.001, which is 0.05 of a horizon of 50 steps.
    np.testing.assert_allclose(parts.solved(points).value, value, atol=0.05)


@pytest.mark.slow
def test_tables_are_interpolated_on_a_circle_of_angles() -> None:
    points = 24
    rng = np.random.default_rng(0)
    angle, speed = rng.uniform(-np.pi, np.pi, 50), rng.uniform(-8, 8, 50)
    seen = parts._observed(jnp.asarray(angle), jnp.asarray(speed))
    states = parts.grid_states(points)
    table = 3 * states[:, 2] + 1  # linear in the velocity, so that the interpolation is exact
    np.testing.assert_allclose(parts.grid_value(table, points, seen), 3 * speed + 1, atol=1e-4)
    table = rng.normal(size=points**2).astype(np.float32)
    np.testing.assert_allclose(parts.grid_value(table, points, states), table, atol=2e-4)
    # Half way between the last and the first angle of the circle.
    edge = parts._observed(jnp.float32(np.pi - np.pi / points), jnp.float32(-8))
    np.testing.assert_allclose(
        parts.grid_value(table, points, edge), (table[0] + table[-points]) / 2, atol=2e-4
    )
    smooth = jnp.sin(jnp.arctan2(states[:, 1], states[:, 0])) + 0.1 * jnp.square(states[:, 2])
    fine = parts.grid_states(200)
    smooth = fine[:, 1] + 0.1 * jnp.square(fine[:, 2])
    gradient = parts.grid_gradient(smooth, 200, seen)
    inside = np.abs(speed) < 7.5
    np.testing.assert_allclose(gradient[:, 0], np.cos(angle), atol=0.02)
    np.testing.assert_allclose(gradient[inside, 1], 0.2 * speed[inside], atol=0.02)


def test_gradients_by_observations_become_those_by_states() -> None:
    def function(observation: Any) -> Any:
        return observation[..., 0] ** 2 * observation[..., 1] + jnp.sin(observation[..., 2])

    angle, speed = jnp.array([0.3, -2.0]), jnp.array([1.0, -5.0])
    by_observation = jax.grad(lambda x: function(x).sum())(parts._observed(angle, speed))
    ours = parts.by_state(parts._observed(angle, speed), by_observation)
    by_angle = jax.grad(lambda a: function(parts._observed(a, speed)).sum())(angle)
    by_speed = jax.grad(lambda s: function(parts._observed(angle, s)).sum())(speed)
    np.testing.assert_allclose(ours, np.stack([by_angle, by_speed], -1), rtol=1e-5)


@pytest.mark.slow
def test_greedy_control_is_as_good_as_its_model() -> None:
    """With the true model and the grid's value the pole goes up; with a model that foresees nothing it hangs."""
    world = distractors.around(pendulum, "noise", 2)
    table = parts.solved(51).value
    value = lambda observation: parts.grid_value(table, 51, observation)
    true = lambda observation, action, key: world.step(observation, action, key)[0]
    blind = lambda observation, action, key: observation
    returns = [
        float(jax.jit(lambda g=guess: parts.control(world, g, value, jax.random.key(0), 8))())
        for guess in (true, blind)
    ]
    assert returns[0] > -500 and returns[1] < -1200


@pytest.mark.slow
def test_data_are_steps_of_the_world_and_distractors_those_of_episodes() -> None:
    world = parts.make_world(parts.FEW)
    distracting = parts.pool(world, jax.random.key(0), 1000)
    assert len(distracting) == 1000 and distracting.shape[1] == 4
    rule = distractors.draw(4)
    later = np.asarray(distracting).reshape(world.LIMIT, -1, 4)
    close = np.isclose(later[1:], distractors.advance(rule, later[:-1]), atol=3e-3)
    assert close.mean() > 0.99
    data = parts.transitions(world, distracting, jax.random.key(1), 500)
    following, _ = world.step(data.observation, data.action)
    np.testing.assert_allclose(data.next_observation, following, atol=1e-2)
    row = parts.rows(data, jnp.array([3, 5]))
    assert row.inputs.shape == (1, 2, 8) and not row.outputs[..., -1].any()
    np.testing.assert_allclose(
        row.outputs[0, :, :-1], (data.next_observation - data.observation)[jnp.array([3, 5])], atol=1e-6
    )


def test_what_is_no_number_is_the_worst_that_it_can_be() -> None:
    """Of errors the largest, of what is better the larger it is the smallest."""
    nothing, large = np.array([np.nan, 0.5]), np.array([np.inf, -np.inf])
    names = ("value_error", "spread", "return", "true_return", "cosine")
    outcome = parts.capped({**dict.fromkeys(names, nothing), "task_error": large})
    worst = {name: values[0] for name, values in outcome.items()}
    assert worst == {
        "value_error": 1e6, "spread": 1e6, "return": -1e6, "true_return": -1e6, "cosine": -1, "task_error": 1e6
    }  # fmt: skip
    assert all(outcome[name][1] == 0.5 for name in names) and outcome["task_error"][1] == -1e6


# ---- the toy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", parts.TOY)
def test_what_the_toy_charges_has_the_closed_form(name: str) -> None:
    """Against the mean of the library's loss over many samples, but for the variance of V(s'), 1, and the constant."""
    settings = value_aware.Settings(normalise=False, clip_quantile=1.0)
    loss = value_aware.make(name, lambda state, seen: parts.toy_value(seen)[None], settings)
    count, charged, closed = 200_000, [], []
    outcome = jax.random.rademacher(jax.random.key(0), (1, count, 1), float)
    outputs = jnp.concatenate([outcome, jnp.zeros_like(outcome)], -1)
    context = value_aware.Context(())
    batch = parts.annotated(loss, context, Rows(jnp.zeros((1, count, 0)), outputs, outcome))
    for mean, deviation in ((0.2, 0.5), (-0.3, 0.9)):
        both = lambda x: jnp.zeros_like(outputs).at[..., 0].set(x)
        prediction = losses.Prediction(both(mean), both(2 * np.log(deviation)))
        half = 2 if name == "mle" else 1  # the likelihood is the mean with a reward's, which is certain here
        charged.append(half * float(loss.train(context, prediction, batch, jax.random.key(1)).mean()))
        closed.append(parts.expected(name, mean, deviation))
    np.testing.assert_allclose(charged[1] - charged[0], closed[1] - closed[0], rtol=0.05, atol=0.03)
    assert abs(charged[0] - closed[0] - (0.0 if name == "mle" else 1.0)) < 0.03


def test_the_toys_minima_are_where_the_report_says() -> None:
    least = {
        name: optimize.minimize(
            lambda x, name=name: parts.expected(name, x[0], np.exp(x[1])), [0.1, -0.7], method="Nelder-Mead",
            options={"maxiter": 4000, "xatol": 1e-8, "fatol": 1e-14},
        ).x
        for name in ("mle", "vaml")
    }  # fmt: skip
    np.testing.assert_allclose([least["mle"][0], np.exp(least["mle"][1])], [0, 1], atol=1e-4)
    np.testing.assert_allclose([least["vaml"][0], np.exp(least["vaml"][1])], [parts.GOLDEN, 0], atol=1e-2)
    assert parts.expected("calibrated", 0.0, 1.0) == 0  # the likelihood's minimum is calibrated


# ---- claims --------------------------------------------------------------------------------------------------------


def rows() -> dict[str, Any]:
    """A result with which all claims hold; seeds differ, and so do differences and ratios."""
    two = lambda x: x * np.array([1.0, 1.01 + 1e-3 * np.sin(x)])

    def model(returned: float, error: float) -> dict[str, Any]:
        return {"return": two(returned), "value_error": two(error), "task_error": two(1.0)}

    good = {loss: model(-340, 2.0) for loss in ("vagram", "taylor", "vaml")}
    controls = {
        "standardised": -1450,
        "value_weighted": -1500,
        "anisotropic": -1400,
        "anisotropic_rows": -1300,
    }
    known = {"weight": np.array([1e-4, 1e-3])}
    curve = lambda x: two(x) + np.zeros((parts.PIECES, 1))
    head = {"scalar": (0.8, 4.0), "two_hot": (0.85, 3.0), "hl_gauss": (0.9, 2.5), "c51": (0.86, 3.0)}
    return {
        "pendulum": {
            study.PLAIN: {"known": known, "8": {"mse": model(-330, 9), "vagram": model(-335, 3)}},
            study.MANY: {
                "known": known,
                "8": {
                    "mse": model(-1800, 90),
                    **good,
                    **{name: model(x, 80) for name, x in controls.items()},
                },
            },
            **{
                name: {"known": known, "8": {"mse": model(-350, 3), "vagram": model(-345, 2)}}
                for name in (study.NOISE, study.WHOLE)
            },
        },
        "landscape": {"reach": {"mse": two(0.1), "vagram": two(0.12), "taylor": two(1.5), "vaml": two(1.2)}},
        "changing": {
            loss: {"return": curve(x)}
            for loss, x in {
                "mse": -600,
                "vagram": -400,
                "taylor": -900,
                "vaml": -1200,
                "standardised": -650,
                "anisotropic": -1300,
            }.items()
        },
        "toy": {
            "mle": {"mean": np.full((2, 2), 0.01), "deviation": np.full((2, 2), 0.99)},
            "vaml": {"mean": np.full((2, 2), 0.618), "deviation": np.full((2, 2), 0.01)},
            "calibrated": {"mean": np.full((2, 2), 0.2), "deviation": np.full((2, 2), 0.76**0.5)},
        },
        "heads": {
            noise: {
                name: {"cosine": two(cosine), "value_error": two(error)}
                for name, (cosine, error) in head.items()
            }
            for noise in ("0", "4")
        },
    }


MANY_8 = ("pendulum", "16 distractors", "8")


@pytest.mark.parametrize(
    ("place", "value", "denied"),
    [
        ((*MANY_8, "vagram", "return"), -np.array([490.0, 501]), ["vagram returns more than -500"]),
        ((*MANY_8, "taylor", "return"), -np.array([340.0, 501]), ["taylor returns more than -500"]),
        ((*MANY_8, "mse", "return"), -np.array([1190.0, 1195]), ["mse returns less than -1200", *["than mse"] * 4]),
        (("pendulum", "16 distractors", "known", "weight"), np.array([0.0, 0.02]), ["below 1 %"]),
        (("pendulum", "no distractors", "8", "vagram", "return"), -np.array([400.0, 400]), ["at most 15 %"]),
        ((*MANY_8, "vagram", "value_error"), np.array([90.0, 91]), ["the value error of vagram"] * 5),
        ((*MANY_8, "anisotropic", "value_error"), np.array([2.0, 2.0]), ["smaller than that of anisotropic "]),
        ((*MANY_8, "anisotropic", "return"), -np.array([330.0, 331]), ["returns more than anisotropic,"]),
        ((*MANY_8, "value_weighted", "return"), -np.array([1900.0, 1901]), ["value_weighted returns more"]),
        (("pendulum", "16 of noise", "8", "mse", "return"), -np.array([900.0, 901]), ["noise, width.*100 more"]),
        (("pendulum", study.WHOLE, "8", "mse", "return"), -np.array([900.0, 901]), ["whole.*100 more"]),
        (("landscape", "reach", "taylor"), np.array([0.12, 0.1201]), ["taylor charges little"]),
        (("landscape", "reach", "vaml"), np.array([0.2, 0.202]), ["half as far"]),
        (("changing", "taylor", "return"), np.full((20, 2), -300.0), ["the mean.*taylor", "the worst.*taylor"]),
        (("toy", "vaml", "deviation"), np.array([[0.1, 0.1]]), ["collapses"]),
        (("toy", "vaml", "mean"), np.array([[0.5, 0.618]]), ["closed form, mean 0.618"]),
        (("toy", "calibrated", "deviation"), np.full((2, 2), 0.2), ["keeps the deviation", "calibrated loss ends"]),
        (("toy", "mle", "mean"), np.full((2, 2), 0.1), ["likelihood ends"]),
        (("heads", "4", "c51", "cosine"), np.array([0.5, 0.51]), ["noise 4: the gradient of c51"]),
        (("heads", "0", "hl_gauss", "value_error"), np.array([6.0, 6.1]), ["noise 0: vagram with hl_gauss"]),
    ],
)  # fmt: skip
def test_each_claim_holds_of_what_it_says_and_fails_of_what_it_denies(
    place: tuple[str, ...], value: np.ndarray, denied: list[str]
) -> None:
    import re

    result = rows()
    assert {row["verdict"] for row in studies.judged(study.claims(result))} == {studies.HOLDS}
    changed = copy.deepcopy(result)
    *path, what = place
    inner = changed
    for step in path:
        inner = inner[step]
    inner[what] = value
    failed = [
        row["claim"] for row in studies.judged(study.claims(changed)) if row["verdict"] != studies.HOLDS
    ]
    assert len(failed) == len(denied)
    assert all(re.search(text, claim) for text, claim in zip(denied, failed, strict=True)), failed


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ({"vagram": -340, "anisotropic": -1400, "mse": -1800}, "uneven weights alone gain something"),
        (
            {"vagram": -340, "anisotropic": -2200, "mse": -1800},
            "given to random dimensions; its weights given to random dimensions are worse than plain errors",
        ),
        (
            {"vagram": -340, "anisotropic": np.array([-1700.0, -1900]), "mse": -1800},
            "given to random dimensions; whether its weights given to random dimensions gain anything",
        ),
        (
            {"vagram": -340, "anisotropic": -1900, "standardised": -700, "mse": -1800},
            "gains by what the value knows, more than squared errors over",
        ),
        (
            {"vagram": -340, "anisotropic": -1900, "standardised": np.array([-300.0, -390]), "mse": -1800},
            "which ask no value",
        ),
        ({"vagram": -340, "anisotropic": np.array([-300.0, -390]), "mse": -1800}, "is not told apart from"),
        ({"vagram": -1900, "anisotropic": -1800, "mse": -1800}, "is worse than plain errors"),
        (
            {"vagram": np.array([-1700.0, -1900]), "anisotropic": -1800, "mse": -1800},
            "shows no gain over plain errors",
        ),
        (
            {"vagram": -700, "anisotropic": -340, "mse": -1800},
            "gain is smaller than that of its weights given to random",
        ),
        (
            {"vagram": -700, "anisotropic": -1900, "standardised": -340, "mse": -1800},
            "gain is smaller than that of squared errors over the variance",
        ),
        ({"vagram": -340, "mse": -1800}, "there is no answer"),
    ],
)
def test_the_sentence_is_what_the_control_decides(returns: dict[str, Any], words: str) -> None:
    """By each measure: errors of value are as good where returns are."""
    many = {}
    for loss, x in returns.items():
        each = x * np.array([1, 1.01 + 1e-4 * len(loss)])
        many[loss] = {"return": each, "value_error": np.exp(-each / 100)}
    text = study.sentence({"pendulum": {study.MANY: {"8": many}}})
    assert text.count(words) == (2 if len(returns) > 2 else 1)


# ---- the study -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to report, and numbers that say that something was learned."""
    few = {study.MANY: ("distractors", 2)}
    for name, value in {"WORLDS": few, "PIECES": 2, "CHANGING": (study.MANY, 8)}.items():
        for module in (study, parts):
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(parts, "LANDSCAPE", study.MANY)
    for name, value in {"PIXELS": 5, "SAMPLES": 2, "REWARD_NOISE": (0.0,)}.items():
        monkeypatch.setattr(parts, name, value)
    monkeypatch.setattr(study, "HEADS", ("hl_gauss",))
    settings = study.Settings(
        losses="vagram", seeds=2, widths=(8,), grid=21, value_hidden=(16,), value_updates=200, transitions=400,
        test_transitions=100, batch_size=64, updates=200, starts=2, changing_updates=40, toy_updates=600,
        heads_updates=40, learning_rate=1e-2, out=str(tmp_path / "new"),
    )  # fmt: skip
    result = study.run(settings)
    assert set(result["pendulum"][study.MANY]["8"]) == {"vagram"}
    assert set(result["changing"]) == {"vagram", "true model"}
    assert (result["pendulum"][study.MANY]["known"]["value_rmse"] < 50).all()  # of values from -200 to 0
    assert (np.abs(result["toy"]["mle"]["deviation"][-1] - 1) < 0.1).all()
    assert result["changing"]["vagram"]["return"].shape == (2, 2)
    stored = studies.load(tmp_path / "new" / log.RESULT)
    assert stored["claims"] == studies.judged(study.claims(stored)) == result["claims"]
    text = (tmp_path / "new" / studies.REPORT).read_text()
    assert all(
        f"## {part}" in text for part in ("Pendulum", "Landscape", "Changing", "Toy", "Heads", "Claims")
    )
    # The world of the claims is in the report, any other in a file of its own.
    assert f"### {study.MANY}: return" in text and study.POINTS in text
    assert (tmp_path / "new" / study.POINTS).read_text().startswith("# VaGraM")
    drawn = {path.name for path in (tmp_path / "new").glob("*.png")}
    assert drawn == {
        "returns.png", "value_error.png", "landscape.png", "changing.png", "toy.png", "heads.png"
    }  # fmt: skip


def test_what_other_commands_trained_is_taken_with_where_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def part(settings: study.Settings, *of: Any) -> dict[str, Any]:
        *name, _ = of
        trained.append(name)
        return {
            "return": np.arange(6.0).reshape(3, 2),
            "bias": np.ones((3, 2)),
            "spread": np.ones((3, 2)),
            "task_error": np.ones((3, 2)),
        }

    monkeypatch.setattr(parts, "changing", part)
    monkeypatch.setattr(studies, "digest", lambda name, variant: name)
    monkeypatch.setattr(study, "draw", lambda *_: None)
    settings = study.Settings(parts="changing", losses="mse,vagram", seeds=2, out=str(tmp_path / "first"))
    study.run(settings)
    assert trained == [["mse"], ["vagram"], [parts.TRUE]]
    trained.clear()
    more = study.Settings(
        parts="changing", losses="mse,standardised,vagram", seeds=2, widths=(8,), stored=str(tmp_path / "first"),
        out=str(tmp_path / "second"),
    )  # fmt: skip
    result = study.run(more)
    assert trained == [["standardised"]]
    assert list(result["changing"]) == ["mse", "standardised", "vagram", parts.TRUE]
    assert [row["name"] for row in result["rows"] if "provenance" not in row] == ["changing, standardised"]
    assert "3 of 4 rows are of `" in (tmp_path / "second" / studies.REPORT).read_text()
    assert any("vagram than by standardised" in claim["claim"] for claim in result["claims"])
    # Joined again, everything keeps where it is from.
    third = study.run(
        study.Settings(**{**vars(more), "stored": str(tmp_path / "second"), "out": str(tmp_path / "third")})
    )
    assert len(trained) == 1 and all("provenance" in row for row in third["rows"])
    with pytest.raises(ValueError, match="was made with --seeds=2, and this command has 5"):
        study.run(study.Settings(**{**vars(more), "seeds": 5}))


def test_the_stored_results_lack_no_more_than_the_control_for_units() -> None:
    """Worlds, parts and losses are found under the names by which they are trained."""
    folder = Path(study.__file__).parents[2] / "results/papers/vagram"
    result, more = (studies.load(place / log.RESULT) for place in (folder, folder / "standardised"))
    assert set(study.held(result, "pendulum, 16 distractors").outcome) == {"known"}
    for name in (
        "pendulum, 16 of noise, 8, mse",
        "landscape",
        "changing, true model",
        "toy, mle",
        "heads, 4, c51",
    ):
        assert study.held(result, name).provenance["commit"] == result["commit"]
    assert (
        study.held(result, "changing, standardised")
        is None
        is study.held(result, "pendulum, 16 distractors, 8, standardised")
    )
    assert (
        study.held(more, "pendulum, 16 distractors, 8, standardised").provenance["commit"] == more["commit"]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts": "toys"}, "--parts: toys is none of pendulum, landscape, changing, toy, heads"),
        ({"losses": "mse,vagrams"}, "--losses: vagrams is none of mle, mse"),
        ({"seeds": 1}, "--seeds=1: an interval over seeds needs at least 2"),
        ({"updates": 30}, "--updates=30 must be a multiple of 20"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.run(study.Settings(**fields))
