"""What every learner promises to the loop, for every agent with every value head.

Each agent and head is compiled once: an epoch of 20 updates for two seeds, which most tests share. A few
agents are compiled twice more: with 60 updates, and for one seed alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import logged
from rl import agents, buffers, checkpoint, exported, model_based, shard, train
from rl import keys as streams
from rl.agents.state import is_off
from rl.data import synthetic
from rl.data.steps import Loaded
from rl.networks import entity
from rl.replay import chunks, goals
from rl.replay import dataset as replay
from rl.replay.goals import GoalBatch
from rl.replay.source import Configured, Source, concatenated
from rl.types import Key, Learner, State, Transition
from rl.values import heads

GOALS = (
    "crl",
    "gcbc",
    "gciql",
    "gcivl",
    "hiql",
    "qrl",
)  # they learn from trajectories, with goals in hindsight
CONTINUOUS = (
    *("arsq", "bc", "cql", "cqn", "deas", "edac", "fql", "ifql", "iql", "rebrac", "sac", "sac_n", "td3"),
    "td3_bc",
)
# One head will do: sac and td3 are the code of sac_n and td3_bc, the heads of fql and of cqn, slow to compile, are in
# test_agents, and behaviour cloning has no values
ONE_HEAD = {
    "bc": "hl_gauss",
    "cqn": "hl_gauss",
    "deas": "hl_gauss",
    "fql": "c51",
    "ifql": "two_hot",
    "sac": "scalar",
    "td3": "scalar",
}
# Of the agents with goals crl, gcbc and qrl use none; test_goal_agents has the other heads. hecrl, whose networks take
# half a minute to compile, has its promises in test_hecrl
ONE_HEAD |= dict.fromkeys(GOALS, "scalar") | {"gciql": "hl_gauss"}
TRAINED_GOALS = ("hiql",)  # the one with the most parts; test_goal_agents has every part of an update of each
DISCRETE = ("bc", "cql", "dqn", "iql")


def left_out(kind: str, agent: str, head: str) -> Any:
    """What a case is marked with: ifql, whose code deas is, has the values of iql and the flow of fql; sac and td3 are
    the code of sac_n and td3_bc.
    """
    if agent in ("deas", "ifql", "sac", "td3"):
        return pytest.mark.long
    return [] if (head == "hl_gauss" or agent in ONE_HEAD) and kind != "goals" else pytest.mark.slow


TRACED = [
    pytest.param(
        (kind, agent, head),
        id=f"{kind}-{agent}-{head}",
        marks=left_out(kind, agent, head),
    )
    for kind, names in (("continuous", CONTINUOUS), ("discrete", DISCRETE), ("goals", GOALS))
    for agent in names
    for head in ((ONE_HEAD[agent],) if agent in ONE_HEAD else heads.NAMES)
]

CASES = [case for case in TRACED if case.values[0][1] not in set(GOALS) - set(TRAINED_GOALS)]

# Every agent, where shapes and types are all that is asked for.
traced = pytest.mark.parametrize("case", TRACED, indirect=True)


def others_long(in_ci: Callable[[Any], bool], cases: Sequence[Any] = CASES) -> pytest.MarkDecorator:
    """All of ``cases``, of which only those of ``in_ci(case)`` run in CI."""
    return pytest.mark.parametrize(
        "case",
        [
            case if in_ci(case) else pytest.param(*case.values, id=case.id, marks=pytest.mark.long)
            for case in cases
        ],
        indirect=True,
    )


def one_head_or_goals(case: Any) -> bool:
    return not case.marks or case.values[0][0] == "goals"


# Each agent with one head, where a test compiles an epoch of its own: length and number of epochs are the loop's, to
# which batches with goals are batches. CI asks those whose updates depend on the step or on the number of networks in
# ways of their own: a delayed policy, an ensemble, tokens, a value beside its critic, integer actions.
IN_CI = {("continuous", agent) for agent in ("rebrac", "edac", "arsq", "iql")} | {("discrete", "dqn")}
each_agent = others_long(lambda case: case.values[0][:2] in IN_CI, [case for case in CASES if not case.marks])
# Where a test runs epochs: with one head and, of the agents with goals, the one with the most parts.
trained = others_long(
    lambda case: case.values[0][0] == "goals" or (not case.marks and case.values[0][:2] in IN_CI)
)
# Where a test asks one compiled update: with one head.
asked = others_long(one_head_or_goals)

BATCH, STEPS, SEEDS = 16, 20, 2
SMALL: dict[str, dict[str, Any]] = {
    "arsq": {"bins": 3},
    "cql": {"samples": 3},
    "cqn": {"bins": 3, "features": 4, "levels": 1},
    "crl": {"latent": 8},
    "deas": {"flow_steps": 2, "candidates": 3},
    "edac": {"critics": 3},
    "fql": {"flow_steps": 2},
    "ifql": {"flow_steps": 2, "candidates": 3},
    "hecrl": {"network": entity.Shape(4, 4, 1, 1)},
    "qrl": {"latent": 8},
    "sac_n": {"critics": 3},
}

# The parameters that each loss may move; everything else in it is a target.
OWN = {
    "critic_loss": ("critic", "q"),
    "value_loss": ("value", "representation"),
    "contrastive_loss": ("critic",),
    "distance_loss": ("distance",),
    "flow_loss": ("flow",),
    "dynamics_loss": ("dynamics", "distance"),
    # it asks the critic, or the distance to what the dynamics say, and is weighted by alpha
    "policy_loss": ("policy", "critic", "log_alpha", "distance", "dynamics"),
    "high_policy_loss": ("high_policy",),
    "subgoal_loss": ("subgoal",),
}


def small(agent: str, **fields: Any) -> Any:
    widths = {} if agent == "hecrl" else {"hidden": (8,)}
    return agents.get(agent).Config(**widths, **SMALL.get(agent, {}), **fields)


def maker(agent: str, loaded: Loaded, head: str, optimiser: Any = optax.adam) -> Callable[[Any], Learner]:
    value_head = heads.make(head, -20.0, 1.0, 11)
    return lambda config: agents.get(agent).make(config, loaded.spec, value_head, optimiser)


def load(kind: str) -> Loaded:
    loaded = synthetic.load(f"synthetic-{'continuous' if kind == 'goals' else kind}")
    return loaded._replace(spec=goals.conditioned_spec(loaded.spec)) if kind == "goals" else loaded


def source(kind: str, config: Any) -> tuple[Any, Source]:
    """What an agent's batches are drawn from, and how."""
    dataset = load(kind).dataset
    if kind != "goals":
        return dataset, replay.sampler(BATCH)
    return goals.trajectories(dataset, config.goals), goals.sampler(BATCH, config.goals, 0.99)


def two_rows(kind: str) -> Any:
    """A batch that says what shapes they have."""
    steps = replay.take(load(kind).dataset, np.arange(2))
    if kind != "goals":
        return steps
    goal = steps.next_observation
    seen = {
        name: goals.conditioned(getattr(steps, name), goal) for name in ("observation", "next_observation")
    }
    return GoalBatch(steps._replace(**seen), goal, goal, goal)


class Case(NamedTuple):
    learner: Learner
    runs: train.Population  # of SEEDS seeds and STEPS updates per epoch, its epoch compiled with donation
    longer: Callable[..., Any]  # the same with 3 * STEPS updates per epoch
    traces: list[None]  # one entry per time the epoch was traced
    spec: Any
    dataset: Any
    sample: Source
    example: Any  # a `Transition`, or a `GoalBatch`
    steps: Transition  # of either
    initial: Callable[[], State]  # `start`
    keys: Key
    trained: list[State]  # after 1, 2, ... epochs from the start, on the host; `after` adds to it

    @property
    def start(self) -> State:
        """Stacked, on the host: `epochs` puts a copy of it onto the device."""
        return self.initial()

    def copy(self, state: State) -> State:
        """``state`` on the device, committed as what a checkpoint restores is: both run the same program."""
        return jax.device_put(jax.tree.map(np.array, state), jax.devices()[0])

    def epochs(self, count: int, start: State | None = None) -> State:
        """The state after ``count`` epochs."""
        state = self.copy(self.start if start is None else start)
        for _ in range(count):
            state, _ = self.runs.epoch(state, self.dataset, self.keys)
        return state

    def after(self, count: int) -> State:
        """The same from the start, on the host: run once, for all tests that compare something with it."""
        while len(self.trained) < count:
            before = self.trained[-1] if self.trained else self.start
            self.trained.append(jax.device_get(self.epochs(1, start=before)))
        return self.trained[count - 1]


@functools.cache
def initial(kind: str, agent: str, outputs: int) -> State:
    """Stacked over seeds, on the host. Of a head it knows the number of outputs alone, which four of them share."""
    loaded = load(kind)
    head = "scalar" if outputs == 1 else "hl_gauss"
    runs = train.population(maker(agent, loaded, head), small(agent), replay.sampler(BATCH), STEPS)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    return jax.device_get(jax.jit(runs.init)(keys, two_rows(kind)))


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    kind, agent, head = request.param
    loaded = load(kind)
    config, make = small(agent), maker(agent, loaded, head)
    dataset, sample = source(kind, config)
    runs = train.population(make, config, sample, STEPS)
    traces: list[None] = []

    def counted(*arguments: Any) -> Any:
        traces.append(None)
        return runs.epoch(*arguments)

    device = jax.devices()[0]
    example = two_rows(kind)
    keys = jax.device_put(jax.random.split(jax.random.key(0), SEEDS), device)
    return Case(
        learner=make(config),
        runs=runs._replace(epoch=jax.jit(counted, donate_argnums=0)),
        longer=jax.jit(train.population(make, config, sample, 3 * STEPS).epoch),
        traces=traces,
        spec=loaded.spec,
        dataset=jax.device_put(dataset, device),
        sample=sample,
        example=example,
        steps=example.value if kind == "goals" else example,
        initial=functools.partial(initial, kind, agent, 1 if head == "scalar" else 11),
        keys=keys,
        trained=[],
    )


def leaves(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), np.asarray(leaf)


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), (_, b) in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=path)


def assert_close(one: Any, other: Any) -> None:
    """To 1e-6, of the largest entry of each array where that is above 1."""
    for (path, a), (_, b) in zip(leaves(one), leaves(other), strict=True):
        tolerance = 1e-6 * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=path)


def seed(state: State, index: int) -> State:
    """One seed's slice of a stacked state, on the host."""
    return jax.tree.map(np.asarray, train.member(state, index))


def moved(before: Any, after: Any) -> set[str]:
    """Names of the parameters that changed."""
    return {
        name
        for name in before
        if any(
            (a != b).any() for (_, a), (_, b) in zip(leaves(before[name]), leaves(after[name]), strict=True)
        )
    }


# ---- every agent with every head --------------------------------------------------------------------


@trained
def test_same_key_same_bits(case: Case) -> None:
    assert_same_bits(case.epochs(2), case.after(2))


@trained
def test_different_keys_differ_everywhere(case: Case) -> None:
    """From the same parameters: in what is initialised, and in what the updates draw."""
    twins = jax.tree.map(lambda x: x[np.array([0, 0])], case.start._replace(step=None))
    trained = case.epochs(1, start=twins._replace(step=case.start.step))
    learned = moved(case.start.params, trained.params)
    assert learned
    assert moved(seed(trained, 0).params, seed(trained, 1).params) == learned
    assert moved(seed(case.start, 0).params, seed(case.start, 1).params) >= learned - {
        "log_alpha",
        "multiplier",
    }


@pytest.mark.slow
@each_agent
def test_one_epoch_of_60_is_three_of_20_bit_for_bit(case: Case) -> None:
    assert_same_bits(case.longer(case.start, case.dataset, case.keys)[0], case.after(3))


@trained
def test_kill_and_resume_is_bit_for_bit_the_uninterrupted_run(case: Case, tmp_path: Any) -> None:
    run = {"state": case.copy(case.start), "keys": case.keys}
    checkpoint.save(tmp_path, STEPS, run | {"state": case.copy(case.after(1))}, {})
    saved, step = checkpoint.restore(tmp_path, run, {}) or pytest.fail("there is no checkpoint")
    assert step == saved["state"].step == STEPS
    resumed, _ = case.runs.epoch(saved["state"], case.dataset, saved["keys"])
    assert_same_bits(resumed, case.after(2))
    assert len(case.traces) == 1


@pytest.mark.slow
@each_agent
def test_a_seed_in_a_population_is_that_seed_alone(case: Case) -> None:
    """To 1e-6 and not to the bit: vmapped matrix products sum in another order, and 20 steps of Adam, each of
    3e-4, carry on a difference of 1e-7 in a gradient. Moments show it larger, relative to their size.
    """
    alone = jax.jit(train.scan_updates(case.learner.update, case.sample, STEPS))
    state, _ = alone(seed(case.start, 1), case.dataset, case.keys[1])
    one_of_many = seed(case.after(1), 1)
    assert one_of_many.step == state.step
    assert_close(one_of_many.params, state.params)
    assert_close(one_of_many.target, state.target)


@trained
def test_one_compile_per_run_and_nothing_crosses_to_the_host(case: Case) -> None:
    state = case.copy(case.start)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state, _ = case.runs.epoch(state, case.dataset, case.keys)
    assert len(case.traces) == 1
    assert state.step == 3 * STEPS


@traced
def test_update_keeps_every_shape_and_type(case: Case) -> None:
    """Down to weak types, any of which would cost a second compile; and all floats are float32."""
    state = jax.eval_shape(case.learner.init, case.keys[0], case.example)
    # Rows may say where they are from, demonstrations among one's own: `rl.replay.source`.
    batch = case.example
    if isinstance(batch, Transition):
        batch = batch._replace(origin=jnp.arange(2, dtype=jnp.int32))
    after, metrics = jax.eval_shape(case.learner.update, state, batch, case.keys[0])
    assert jax.tree.structure(state) == jax.tree.structure(after)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type), name
        assert a.dtype in (jnp.float32, jnp.int32), name
    # What a categorical head cuts off is never silent. Behaviour cloning has no values.
    assert ("clipped" in metrics) == bool({"critic_loss", "value_loss"} & set(metrics))
    for name, metric in metrics.items():
        assert (metric.shape, metric.dtype) == ((), jnp.float32), name


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_no_gradient_through_targets(case: Case) -> None:
    """A loss moves its own networks: neither the target networks, nor online ones that only make its target.

    Each agent's test of one update by its equations would fail, too; this one names the loss and the network.
    """
    state = seed(case.start, 0)

    @jax.jit
    def gradients(state: State) -> dict[str, Any]:
        def losses(params: Any, target: Any) -> dict[str, Any]:
            inputs = state._replace(params=params, target=target)
            metrics = case.learner.update(inputs, case.example, case.keys[0])[1]
            return {name: metric for name, metric in metrics.items() if name in OWN}

        values, pull_back = jax.vjp(losses, state.params, state.target)  # traced once for all losses
        each = dict(zip(values, jnp.eye(len(values)), strict=True))
        of_params, of_target = jax.vmap(pull_back)(each)  # the first axis of each leaf: which loss
        return {
            name: jax.tree.map(
                lambda x, i=i: x[i],
                ({k: v for k, v in of_params.items() if k not in OWN[name]}, of_target),
            )
            for i, name in enumerate(values)
        }

    losses = gradients(state)
    assert losses.keys() >= {"critic_loss"} or case.learner.critics is None
    for path, gradient in leaves(losses):
        assert not gradient.any(), path


@traced
def test_targets_are_outside_parameters_and_optimiser(case: Case) -> None:
    state = jax.eval_shape(case.learner.init, case.keys[0], case.example)
    assert set(state.optimiser) == set(state.params) >= set(state.target)
    for name, params in state.params.items():
        # Adam: a counter (two with a schedule), and two moments of exactly the parameters of that name.
        counters, moments = [], []
        for leaf in jax.tree.leaves(state.optimiser[name]):
            (counters if leaf.dtype == jnp.int32 else moments).append(leaf)
        assert 1 <= len(counters) <= 2 and all(leaf.shape == () for leaf in counters)
        shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
        assert [leaf.shape for leaf in moments] == 2 * shapes, name


@asked
def test_actions_are_valid_for_one_observation_and_for_many(case: Case) -> None:
    state, observations = seed(case.start, 0), case.steps.observation
    act, first = case.learner.act, jax.tree.map(lambda x: x[0], observations)
    both = jax.jit(lambda state, key: (act(state, observations, key), act(state, first, key)))
    many, one = map(np.asarray, both(state, case.keys[0]))
    assert many.dtype == case.steps.action.dtype and many.shape == case.steps.action.shape
    np.testing.assert_allclose(one, many[0], rtol=1e-6, atol=1e-6)
    low, high = (0, case.spec.action_size - 1) if case.spec.discrete else (-1, 1)
    assert (many >= low).all() and (many <= high).all()


# ---- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", sorted(set(CONTINUOUS) ^ set(DISCRETE)))
def test_an_agent_refuses_actions_it_cannot_take(agent: str) -> None:
    kind = "discrete" if agent in CONTINUOUS else "continuous"
    loaded = synthetic.load(f"synthetic-{kind}")
    have = "integer" if kind == "discrete" else "continuous"
    with pytest.raises(
        ValueError, match=rf"cannot act in {have} actions: use (dqn|sac, td3, .*), or from a log also .*iql"
    ):
        maker(agent, loaded, "scalar")(small(agent))


@pytest.mark.parametrize("agent", [*agents.AGENTS, "rl.agents.ilql", "rl.agents.bcoder", "rl.agents.lm_bc"])
def test_numbers_that_no_agent_can_have_are_refused_by_name(agent: str) -> None:
    """They trained: an expectile of 1.5 without a word, a policy delay of 0 by what a modulo by 0 happens to be."""
    default = agents.get(agent).Config()
    wrong = {
        "discount": 1.7,
        "expectile": 1.5,
        "target_rate": 2.0,
        "learning_rate": -1.0,
        "temperature": -3.0,
    }
    wrong |= {
        "alpha": -1.0,
        "critics": 0,
        "policy_delay": 0,
        "samples": 0,
        "hidden": (8, 0),
        "epsilon": 5.0 if agent == "dqn" else -1.0,  # how often it explores; QRL's is a length, squared
        "epsilon_updates": -1,
    }
    wrong |= dict.fromkeys(("candidates", "replan_every", "latent", "representation"), 0)
    wrong |= dict.fromkeys(("td_weight", "dominance_weight", "margin_weight", "margin", "eta"), -1.0)
    wrong |= dict.fromkeys(("features", "ids", "max_subgoals", "subset", "gumbel"), -1)
    wrong |= dict.fromkeys(("target_entropy", "maximum"), float("nan"))
    for name, value in wrong.items():
        if hasattr(default, name):
            with pytest.raises(ValueError, match=rf"^{name}={re.escape(str(value))} must"):
                dataclasses.replace(default, **{name: value})
            for array in (np.float32, jnp.float32) if np.ndim(value) == 0 else ():
                with pytest.raises(ValueError, match=rf"^{name}=.* must"):
                    dataclasses.replace(default, **{name: array(value)})


def test_edac_needs_two_critics() -> None:
    with pytest.raises(ValueError, match="critics=1: diversity is of gradients of at least 2 critics"):
        agents.get("edac").Config(critics=1)
    agents.get("sac_n").Config(critics=1)


def test_agents_of_other_scripts_are_named_with_these() -> None:
    of_scripts = {
        "language": set(exported.AGENTS),
        "model_based": model_based.METHODS.keys() - agents.AGENTS.keys(),
    }
    assert set(agents.SCRIPTS) == set().union(*of_scripts.values())
    for script, names in of_scripts.items():
        for name in names:
            with pytest.raises(
                ValueError, match=f"unknown agent '{name}': .* python -m experiments.{script}"
            ):
                agents.get(name)


def test_published_names_of_settings_are_answered_with_their_flags() -> None:
    for name, flags in {
        "ReBRAC-10": "--agent=rebrac --agent.critics=10",
        "REDQ": "--agent.subset=2",
        "X-QL": "--agent=iql --agent.gumbel=2",
        "QC": "--chunk=5",
        "VaGraM": "experiments.mbpo --agent=sac --model_loss=vagram",
        "C51": "--agent=dqn --head=c51",
        "QR-DQN": "--agent=dqn --head=quantile",
        "MOPO": r"experiments.model_based --agent=mopo; .*METHODS\['mopo'\]",
        "IQL": "did you mean 'iql'",
    }.items():
        with pytest.raises(ValueError, match=f"unknown agent '{name}': .*{flags}"):
            agents.get(name)


def test_a_file_of_the_current_folder_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the example by its name alone, which hides no agent of the library."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("copied_agent", "iql"):
        shutil.copy(Path(__file__).parent.parent / "docs" / "example_agent.py", tmp_path / f"{name}.py")
    (tmp_path / "half_an_agent.py").write_text("Config = None")
    (tmp_path / "needy_agent.py").write_text("import no_such_library")
    (tmp_path / "short_agent.py").write_text("Config = None\ndef make(config, spec): ...")
    assert agents.get("copied_agent").Config().temperature == 3.0
    assert agents.get("iql") is agents.AGENTS["iql"]
    with pytest.raises(ValueError, match="'half_an_agent' is no agent: it needs a Config and a make"):
        agents.get("half_an_agent")
    with pytest.raises(
        ValueError, match=r"'short_agent': its make is called as make\(config, spec, head\), .*many"
    ):
        agents.get("short_agent")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_library'$"):
        agents.get("needy_agent")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown agent 'td3bc': did you mean 'td3_bc'"):
        agents.get("td3bc")
    with pytest.raises(
        ValueError, match=r"known are arsq, bc, cql, cqn, deas, .*goals \(experiments.goals\) crl,"
    ):
        agents.get("xyz")
    with pytest.raises(
        ValueError, match=r"unknown agent 'qc': QC is fql on chunks .*--agent.extraction=best_of"
    ):
        agents.get("qc")
    for name in ("json", "jax", "numpy", ""):  # modules that are no agents, and no name at all
        with pytest.raises(ValueError, match=f"unknown agent '{name}': .*known are"):
            agents.get(name)
    with pytest.raises(ValueError, match="variant='H': choose one of h, rho, var"):
        maker("cql", synthetic.load("synthetic-discrete"), "scalar")(small("cql", variant="H"))
    with pytest.raises(ValueError, match="unknown value head 'hlgauss'"):
        maker("iql", synthetic.load("synthetic-discrete"), "hlgauss")


# ---- the loop, with one agent -----------------------------------------------------------------------


@functools.cache
def iql() -> tuple[Loaded, Callable[[Any], Learner]]:
    loaded = synthetic.load("synthetic-discrete")
    return loaded, maker("iql", loaded, "scalar")


class Loop(NamedTuple):
    """One population of three seeds, whose epochs several tests run."""

    runs: train.Population
    start: State  # on the host
    keys: Key
    traces: list[None]  # one entry per time the epoch was traced


@functools.cache
def loop() -> Loop:
    loaded, make = iql()
    runs = train.population(make, small("iql"), replay.sampler(BATCH), STEPS)
    traces: list[None] = []

    def counted(*arguments: Any) -> Any:
        traces.append(None)
        return runs.epoch(*arguments)

    keys = jax.random.split(jax.random.key(1), 3)
    start = jax.device_get(runs.init(keys, replay.take(loaded.dataset, np.arange(2))))
    return Loop(runs._replace(epoch=counted), start, keys, traces)


def test_epochs_are_compiled_once_and_their_states_stay_usable() -> None:
    (runs, start, keys, traces), dataset = loop(), jax.device_put(iql()[0].dataset)
    yielded = list(train.epochs(runs.epoch, jax.device_put(start), dataset, keys, 3))
    assert len(traces) == 1
    assert [int(state.step) for state, _ in yielded] == [STEPS, 2 * STEPS, 3 * STEPS]
    epoch = jax.jit(runs.epoch, donate_argnums=0)
    expected = start
    in_turn = train.epochs(runs.epoch, jax.device_put(start), dataset, keys, 3, ahead=False)
    for (state, report), (held, _) in zip(yielded, in_turn, strict=True):
        expected, expected_report = jax.device_get(epoch(jax.device_put(expected), dataset, keys))
        assert_same_bits((state, report), (expected, expected_report))
        assert_same_bits(held, expected)
    # Which holds no state twice: the next epoch was given the one that was yielded before.
    first, second = itertools.islice(
        train.epochs(runs.epoch, jax.device_put(start), dataset, keys, 2, ahead=False), 2
    )
    assert first[0].step.is_deleted() and not second[0].step.is_deleted()


def test_what_is_measured_of_a_state_comes_before_the_next_epoch() -> None:
    """An accelerator would start it only after that epoch, and a log and a checkpoint would wait as long."""
    ran: list[str] = []

    def epoch(state: Any, dataset: Any, key: Any) -> Any:
        jax.debug.callback(lambda step: ran.append(f"epoch {step}"), state)
        return state + 1, train.Report({}, {})

    def measure(state: Any) -> dict[str, Any]:
        jax.effects_barrier()
        ran.append(f"measure {state}")
        return {"validation/double": 2 * state}

    yielded = list(train.epochs(epoch, jnp.int32(0), (), jax.random.key(0), 3, measure))
    assert ran == ["epoch 0", "measure 1", "epoch 1", "measure 2", "epoch 2", "measure 3"]
    assert [(int(state), report.measured) for state, report in yielded] == [
        (step, {"validation/double": 2 * step}) for step in (1, 2, 3)
    ]


def test_numbers_from_python_that_cannot_be_are_refused() -> None:
    """Which JAX would take: it clamps an index, scans no update, and a return has any discount."""
    state = State({"w": jnp.zeros((3, 2))}, {}, {}, jnp.int32(5))
    np.testing.assert_array_equal(train.member(state, -1).params["w"], [0.0, 0.0])
    for index in (3, np.int64(-4)):
        with pytest.raises(IndexError, match=f"there is no seed {index} in a state of 3 seeds"):
            train.member(state, index)
    with pytest.raises(ValueError, match="steps=0: updates per epoch"):
        train.population(iql()[1], small("iql"), replay.sampler(BATCH), 0)
    with pytest.raises(ValueError, match="discount=2 must be between 0 and 1"):
        buffers.steps(n=3, discount=2.0)
    with pytest.raises(ValueError, match=r"discount=-0\.5 must be between 0 and 1"):
        replay.value_bounds(iql()[0].dataset, -0.5)
    for exponent, correction, message in ((-1.0, 0.5, "exponent=-1"), (0.5, 5.0, "correction=5 must")):
        with pytest.raises(ValueError, match=message):
            buffers.prioritised_memory(Learner(*3 * [len]), buffers.steps(), 9, 2, exponent, correction)
    with pytest.raises(
        train.Diverged, match=r"loss not finite at update 0 .* look at the data and at the spec"
    ):
        train.check_finite(train.Report({}, {"loss": np.int32([0, train.NEVER])}))


def test_the_guard_does_catch_transfers() -> None:
    runs, start, keys, _ = loop()
    state = jax.device_put(start)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device"):
        jax.jit(runs.epoch, donate_argnums=0)(state, iql()[0].dataset, keys)


def test_data_on_the_host_are_copied_to_the_device_once() -> None:
    """An epoch would take them as they are, and copy all of them each time, which no result shows."""
    runs, start, keys, _ = loop()
    epochs = train.epochs(runs.epoch, jax.device_put(start), iql()[0].dataset, keys, 3)
    next(epochs)  # starts two epochs, so that the third is left
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert int(next(epochs)[0].step) == 2 * STEPS


@pytest.mark.slow
def test_a_metric_that_is_not_finite_stops_the_run_and_says_which_when_and_where() -> None:
    loaded, (runs, start, keys, _) = iql()[0], loop()
    reward = loaded.dataset.transitions.reward.copy()
    reward[3] = np.nan
    poisoned = loaded.dataset._replace(transitions=loaded.dataset.transitions._replace(reward=reward))

    @jax.jit
    @jax.vmap
    def rows(key: Key) -> jax.Array:
        """[steps, batch]: which are drawn."""
        key = streams.of(key, "update")
        keys = jax.vmap(lambda t: jax.random.split(jax.random.fold_in(key, t))[0])(jnp.arange(STEPS))
        return jax.vmap(lambda k: jax.random.randint(k, (BATCH,), 0, len(reward)))(keys)

    drawn = [min(np.flatnonzero(bad), default=np.inf) for bad in (np.asarray(rows(keys)) == 3).any(-1)]
    hit = [index for index, step in enumerate(drawn) if step < np.inf]
    assert 0 < len(hit) < 3, "choose another key: some seeds must meet the bad row and some must not"
    with pytest.raises(
        train.Diverged, match=rf"^critic_loss not finite at update {min(drawn)} \(seeds "
    ) as raised:
        list(train.epochs(runs.epoch, jax.device_put(start), jax.device_put(poisoned), keys, 1))
    assert f"(seeds {hit})" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
def test_a_sweep_in_one_program_trains_what_separate_programs_train(batched: bool) -> None:
    (loaded, make), seeds = iql(), loop().keys[:2]
    sweep = {"expectile": (0.5, 0.9), "learning_rate": (1e-3, 1e-2)}
    runs = train.population(make, small("iql"), replay.sampler(BATCH), STEPS, sweep=sweep, batched=batched)
    start = jax.tree.map(lambda x: x[:2], loop().start._replace(step=None))._replace(step=loop().start.step)
    together, report = jax.jit(runs.epoch)(start, jax.device_put(loaded.dataset), seeds)
    assert together.step == STEPS
    assert {x.shape for x in report.metrics.values()} == {(2,)}
    for index in range(2):
        alone = separately(index, **{name: values[index] for name, values in sweep.items()})
        assert_close(seed(together, index).params, alone.params)
    assert moved(seed(together, 0).params, seed(together, 1).params)


@functools.cache
def separately(index: int, **fields: float) -> State:
    """That seed of `loop` after an epoch in a program of its own."""
    loaded, make = iql()
    epoch = jax.jit(train.scan_updates(make(small("iql", **fields)).update, replay.sampler(BATCH), STEPS))
    return epoch(seed(loop().start, index), loaded.dataset, loop().keys[index])[0]


def test_metrics_that_are_arrays_are_refused_by_name() -> None:
    metrics = lambda batch: {"loss": jnp.zeros(()), "advantage": batch.reward}
    update = lambda state, batch, key: (state._replace(step=state.step + 1), metrics(batch))
    epoch = train.scan_updates(update, replay.sampler(BATCH), 1)
    with pytest.raises(ValueError, match=rf"of shape: {{'advantage': \({BATCH},\)}}"):
        jax.eval_shape(epoch, State({}, {}, {}, jnp.zeros((), int)), iql()[0].dataset, jax.random.key(0))


def still(state: State, batch: Any, key: Key) -> tuple[State, dict[str, Any]]:
    """An update that does not count itself."""
    return state, {"loss": batch.reward.mean()}


@pytest.mark.parametrize("batched", [True, False])
def test_an_update_that_does_not_count_itself_is_refused(batched: bool) -> None:
    """It would be given one and the same batch for ever."""
    init = lambda key, batch: State({"w": jnp.zeros(())}, {}, {}, jnp.zeros((), int))
    make = lambda config: Learner(init, still, still)
    runs = train.population(make, Gain(), replay.sampler(BATCH), STEPS, batched=batched)
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match=r"update must return state._replace\(step=state.step \+ 1\)"):
        jax.eval_shape(runs.epoch, runs.init(keys, None), iql()[0].dataset, keys)


def test_an_update_compiled_by_itself_does_not_stand_still() -> None:
    """It returns another array of the same step, which looks as if it counted. Nor does this one have metrics."""
    state = State({"w": jnp.zeros(())}, {}, {}, jnp.zeros((), int))
    silent = jax.jit(lambda state, batch, key: (state._replace(params={"w": batch}), {}))
    epoch = train.scan_updates(silent, lambda data, key, step: data[step], 3)
    after, report = epoch(state, jnp.arange(4.0), jax.random.key(0))
    assert (int(after.step), float(after.params["w"]), report.metrics) == (3, 2.0, {})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (jax.random.key(0), r"one for each seed, \[S\], and these are key<fry>\[\]: give rl.keys.seeds"),
        (jax.random.PRNGKey(0), r"these are uint32\[2\]: give rl.keys.seeds"),
        (
            jax.random.split(jax.random.key(0), 3),
            "a sweep of gain over 2 values with 3 keys: .* repeat the values",
        ),
    ],
)
def test_keys_that_are_not_one_for_each_run_are_refused(keys: Any, message: str) -> None:
    init = lambda key, batch: State({}, {}, {}, jnp.zeros((), int))
    make = lambda config: Learner(init, still, still)
    runs = train.population(make, Gain(), replay.sampler(BATCH), STEPS, sweep={"gain": [1.0, 2.0]})
    with pytest.raises(ValueError, match=message):
        runs.init(keys, None)
    with pytest.raises(ValueError, match=message):
        runs.epoch(State({}, {}, {}, jnp.zeros((), int)), iql()[0].dataset, keys)


def test_what_makes_a_source_is_no_source() -> None:
    for made in (replay.sampler, chunks.sampler):
        with pytest.raises(
            ValueError, match=r"'sampler' does not draw .* give a source, as .*sampler\(batch_size\)"
        ):
            train.scan_updates(still, made, 1)


def test_one_seed_starts_alike_alone_and_in_a_population() -> None:
    (loaded, make), (_, start, keys, _) = iql(), loop()
    alone = make(small("iql")).init(streams.of(keys[1], "init"), replay.take(loaded.dataset, np.arange(2)))
    assert_same_bits(seed(start, 1), alone)


@dataclasses.dataclass(frozen=True)
class Gain:
    """Of a policy that needs no training."""

    gain: float = 1.0


def test_runs_of_a_sweep_act_with_their_hyper_parameters() -> None:
    """Policies may depend on them, too: on arsq's temperature, or on hecrl's radius."""
    none = lambda state, batch, key: (state, {})
    make = lambda config: Learner(none, none, lambda state, observation, key: config.gain * observation)
    runs = train.population(make, Gain(), replay.sampler(BATCH), STEPS, sweep={"gain": [2.0, 3.0]})
    state, seen, keys = (
        State({}, {}, {}, np.int32(0)),
        np.ones((2, 1)),
        jax.random.split(jax.random.key(0), 2),
    )
    np.testing.assert_array_equal(runs.act(state, seen, keys), [[2], [3]])
    memory = runs.actor.start(state, seen)
    action, _ = runs.actor.act(state, memory, seen, np.ones((2, 1), bool), keys)
    np.testing.assert_array_equal(action, [[2], [3]])


@pytest.mark.parametrize("field", ["hidden", "critics", "layer_norm", "no_such_field"])
def test_a_field_that_shapes_the_program_cannot_be_swept(field: str) -> None:
    with pytest.raises(ValueError, match=f"cannot sweep '{field}' in one program"):
        train.population(iql()[1], small("iql"), replay.sampler(BATCH), STEPS, sweep={field: [1, 2]})


def test_a_float_that_was_written_as_an_int_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"cannot sweep 'gain' .*, and its value is the int 3: write 3.0$"):
        train.population(iql()[1], Gain(3), replay.sampler(BATCH), STEPS, sweep={"gain": [1.0, 2.0]})


def test_discounts_of_batches_and_of_agents_are_compared() -> None:
    """Half of what a run learned had the discount that it was said to have, without a word."""
    (loaded, make), state = iql(), State({}, {}, {}, jnp.zeros((), int))
    one, config = jax.random.split(jax.random.key(0), 1), small("iql", discount=0.9)
    several = replay.n_step(loaded.dataset, 3, 0.5)
    in_chunks = chunks.make(loaded.dataset, 2, 0.9, 0.8)
    both = concatenated(replay.sampler(BATCH), replay.sampler(BATCH))
    # What stands beside a learner's own steps in its batches.
    steps, of_chunks = buffers.steps(3, 0.9), buffers.chunked(2, 0.9, reward_discount=0.8)
    for view, rows in (
        (buffers.steps(), loaded.dataset),
        (steps, replay.n_step(loaded.dataset, 3, 0.9)),
        (of_chunks, in_chunks),
        (buffers.steps(3, 0.9, td_lambda=0.5), loaded.dataset),
    ):
        buffers.check_logged(view, rows)
    for view, rows in (
        (steps, several),
        (steps, loaded.dataset),
        (of_chunks, chunks.make(loaded.dataset, 2, 0.9)),
        (of_chunks, replay.n_step(loaded.dataset, 2, 0.9, 0.8)),
        (buffers.steps(), in_chunks),
    ):
        with pytest.raises(
            ValueError, match=r"the logged data are .* and the replay reads its rows as .*: make both"
        ):
            buffers.check_logged(view, rows)
    for sample, data in ((replay.sampler(BATCH), several), (both, (loaded.dataset, several))):
        runs = train.population(make, config, sample, STEPS)
        with pytest.raises(
            ValueError, match=r"returns made with discount=0\.5, .* the agent has discount=0\.9"
        ):
            jax.eval_shape(runs.epoch, state, data, one)
    swept = train.population(make, config, chunks.sampler(BATCH), STEPS, sweep={"discount": [0.9]})
    with pytest.raises(
        ValueError, match=r"a sweep of discount: the data hold returns made with discount=0\.9"
    ):
        swept.epoch(state, chunks.make(loaded.dataset, 2, 0.9), one)
    deas = small("deas", discount=0.9, chunk_discount=0.9)
    runs = train.population(make, deas, chunks.sampler(BATCH), STEPS)
    with pytest.raises(
        ValueError, match=r"made with chunk_discount=0\.8, .* the agent has chunk_discount=0\.9"
    ):
        runs.epoch(state, in_chunks, one)
    # Chunks whose rewards have a discount of their own, for an agent that has one discount.
    runs = train.population(make, config, chunks.sampler(BATCH), STEPS)
    with pytest.raises(
        ValueError, match=r"discounted by 0\.8 within their steps, and the agent has one discount"
    ):
        runs.epoch(state, in_chunks, one)
    # Chunks by gamma alone, for an agent with two discounts.
    runs = train.population(
        make, small("deas", discount=0.9, chunk_discount=0.5), chunks.sampler(BATCH), STEPS
    )
    with pytest.raises(
        ValueError, match=r"made with chunk_discount=0\.9, .* the agent has chunk_discount=0\.5"
    ):
        runs.epoch(state, chunks.make(loaded.dataset, 2, 0.9), one)
    # Steps whose rewards all have gamma say nothing of another discount within chunks.
    deas = small("deas", discount=0.5, chunk_discount=0.9)
    count = lambda state, batch, key: (state._replace(step=state.step + 1), {"loss": batch.reward.mean()})
    runs = train.population(lambda config: Learner(count, count, count), deas, replay.sampler(BATCH), STEPS)
    jax.eval_shape(runs.epoch, state, several, one)
    # Nor do chunks of one step.
    runs = train.population(lambda config: Learner(count, count, count), deas, chunks.sampler(BATCH), STEPS)
    jax.eval_shape(runs.epoch, state, chunks.make(loaded.dataset, 1, 0.7, 0.8), one)

    geometric = goals.Hindsight()
    draw = goals.sampler(BATCH, geometric, 0.99)
    for sample in (draw, shard.data_parallel(draw, shard.mesh())):
        with pytest.raises(ValueError, match=r"the source draws with discount=0\.99, .* discount=0\.9"):
            train.population(make, small("gciql", discount=0.9), sample, STEPS)
        with pytest.raises(ValueError, match="a sweep of discount: the source draws"):
            train.population(make, small("gciql"), sample, STEPS, sweep={"discount": [0.9, 0.95]})
    train.population(make, small("gciql", discount=0.99), draw, STEPS)


def test_goals_of_batches_and_of_agents_mean_the_same() -> None:
    """A reward of 1 and 0 was clipped to values of -1 and 0, without a word."""
    config = agents.get("hecrl").Config()
    other = dataclasses.replace(config.goals, negative=not config.goals.negative)
    for hindsight, refused in ((config.goals, False), (other, True)):
        sample = goals.sampler(BATCH, hindsight, config.discount)
        with pytest.raises(ValueError, match=r"goals\.negative=") if refused else contextlib.nullcontext():
            train.population(lambda config: None, config, sample, STEPS)


def test_a_return_over_no_step_is_refused() -> None:
    loaded, _ = iql()
    makers = (
        lambda n: replay.n_step(loaded.dataset, n, 0.9),
        lambda n: replay.lambda_sampler(BATCH, n, 0.9, 0.9),
        lambda n: chunks.make(loaded.dataset, n, 0.9),
        lambda n: buffers.steps(n, 0.9),
        lambda n: buffers.chunked(n, 0.9),
    )
    for make in makers:
        for n in (0, -1):
            with pytest.raises(ValueError, match="give at least 1"):
                make(n)


def test_a_discount_that_no_update_reads_is_not_swept() -> None:
    """All runs were the same; HECRL, whose goals need none, can have several."""
    uniform = goals.Goals(geometric=False)
    hindsight = goals.Hindsight(value=uniform)
    sample, sweep = goals.sampler(BATCH, hindsight, 0.99), {"discount": [0.98, 0.99]}
    keys = jax.random.split(jax.random.key(0), 2)
    for agent in ("crl", "qrl"):
        make = maker(agent, load("goals"), "scalar")
        runs = train.population(make, small(agent, goals=hindsight), sample, STEPS, sweep=sweep)
        with pytest.raises(ValueError, match="a sweep of discount: this agent's updates know none"):
            runs.init(keys, None)
    config = small("hecrl")
    runs = train.population(
        lambda config: Learner(
            lambda key, _: State({"g": config.discount}, {}, {}, jnp.zeros((), int)), still, still
        ),
        config,
        goals.sampler(BATCH, config.goals, 0.99),
        STEPS,
        sweep=sweep,
    )
    np.testing.assert_array_equal(runs.init(keys, None).params["g"], np.float32([0.98, 0.99]))


def test_a_zero_switches_a_term_off_whoever_made_it() -> None:
    """NumPy's and JAX's, too: of a loop over an array, say. Else X-QL would be trained in place of IQL."""
    assert all(is_off(zero) for zero in (0, 0.0, np.int64(0), np.float32(0), np.zeros(()), jnp.zeros(())))
    assert not any(is_off(weight) for weight in (0.5, np.float32(0.5), jnp.ones(())))
    assert not jax.eval_shape(lambda weight: jnp.zeros(3 * is_off(weight)), 0.0).shape[0]  # a tracer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.7, 1.5], r"expectile=1\.5 must lie in"),
        (0.8, "a sweep of expectile needs a list of numbers, one for each run, not 0.8"),
        (["0.7"], "a sweep of expectile needs a list of numbers"),
    ],
)
def test_values_that_the_agent_refuses_cannot_be_swept(values: Any, message: str) -> None:
    """In the program they are traced: it would learn by an expectile that there is not."""
    with pytest.raises(ValueError, match=message):
        train.population(iql()[1], small("iql"), replay.sampler(BATCH), STEPS, sweep={"expectile": values})


def test_a_switch_cannot_be_swept() -> None:
    """CQL's 0 leaves its multiplier out, which a traced 0 does not: the run would be another than it says."""
    cql = small("cql")
    with pytest.raises(ValueError, match=r"a sweep of target_gap over \[0.0, 1.0\]: 0 may switch a term off"):
        train.population(iql()[1], cql, replay.sampler(BATCH), STEPS, sweep={"target_gap": [0.0, 1.0]})


def test_validation_of_a_delayed_policy_is_a_mean_over_whole_periods() -> None:
    """Ten batches held 3 or 4 updates of a policy that moves on every third, by where training stood."""
    due = lambda state, batch, key: (state, {"policy_loss": 3.0 * ((state.step + 1) % 3 == 0)})
    one, mesh = jax.random.split(jax.random.key(0), 1), shard.mesh()

    def learners(settings: Any, wrap: Any) -> Any:
        make = lambda config: wrap(Learner(None, due, None))
        return train.population(make, Gain(), lambda rows, key, step: rows, settings.eval_every), one

    validate = logged.validator(logged.Settings(), np.zeros(2), learners, mesh, period=3)
    for step in range(3):
        state = State({"x": np.zeros(1)}, {}, {}, np.int32(step))
        np.testing.assert_allclose(validate(state)["validation/policy_loss"], [1.0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "agent"),
    [
        *[("continuous", agent) for agent in CONTINUOUS],
        *[("discrete", agent) for agent in DISCRETE],
        *[("goals", agent) for agent in GOALS],
        pytest.param("goals", "hecrl", marks=pytest.mark.long),  # half a minute of tracing
    ],
)
def test_every_field_that_can_be_swept_is_accepted_by_its_agent(kind: str, agent: str) -> None:
    """No float field is used where the program is built: each survives being a tracer."""
    config, make = small(agent), maker(agent, load(kind), "scalar")
    dataset, sample = source(kind, config)
    floats = {f.name for f in dataclasses.fields(config) if train.can_be_swept(config, f.name)}
    floats -= {name for name, _ in sample.settings} if isinstance(sample, Configured) else set()
    sweep = {name: [getattr(config, name) or 0.5] * 2 for name in floats}  # no 0, which is a switch
    runs = train.population(make, config, sample, STEPS, sweep=sweep)
    keys = jax.random.split(jax.random.key(0), 2)
    state = jax.eval_shape(runs.init, keys, two_rows(kind))
    jax.eval_shape(runs.epoch, state, dataset, keys)
