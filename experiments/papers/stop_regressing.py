"""The synthetic studies of "Stop Regressing" (Farebrother et al., ICML 2024), every value head side by side.

    python -m experiments.papers.stop_regressing
    python -m experiments.papers.stop_regressing --parts=plasticity --phase_steps=5000 --out=runs/papers/plasticity
    python -m experiments.papers.stop_regressing --parts=rates --out=results/papers/stop_regressing/rates
    python -m experiments.papers.stop_regressing --parts=noise,sarsa --out=results/papers/stop_regressing/sarsa
    python -m experiments.papers.stop_regressing --parts=linear --out=results/papers/stop_regressing/linear

- Plasticity (the paper's B.4, figure 17): a network fits targets that jump by 8 from phase to phase. The paper takes
  images of CIFAR-10, here inputs are Gaussian. A large error after a jump need not mean that the network can no longer
  learn: an offset of 8 takes its time to fit. So beside it stands a network without history: one with new initial
  weights in every phase, which has fitted nothing but the offset of the phase before. Plasticity is lost where the
  network with a history fits worse.
- Noisy rewards (figure 14) and chance in the dynamics (figure 15): double DQN on a log of a gridworld of four rooms,
  with noise U(0, eta) on every logged reward, and with actions that are deterministic or, as on Atari, repeat the one
  before with probability 0.25. The paper does this on Atari, the first offline and with HL-Gauss and squared error
  alone, the second online and with C51 beside them.
- Bins and the width of the Gaussian (figure 13), on the same gridworld. Bins are all outputs here, the padding of
  HL-Gauss among them (`rl.values.heads.hl_gauss`), so that a wider Gaussian has fewer and wider bins within the values
  that there are; the paper varies both numbers alone, and its conclusion cannot be tested by these.
- SARSA (figure 18), which in the paper has no gain from HL-Gauss: the same logs and noises, but targets continue with
  the logged next action. What is learned are the values of uniform actions; the greedy policy is one step of
  improvement on them.
- Frozen features (figure 16): the last hidden layer of each head's double DQN, standardised, is the input of a linear
  double DQN, which learns from the same log, at a rate that falls to 0. Once with the head whose features they are,
  once with squared error for all, because we do not know which of the two the paper did. Beside them stand the features
  of a network that has learned nothing.
- The learning rate, because the paper compares heads at different ones (its tables B.1 to B.3): which head is best at
  its own best rate, chosen on seeds that are not reported.

Beside the heads stands the paper's control, a softmax trained with squared error (figures 11 and 12). In the plasticity
study stands, too, a scalar whose output is multiplied by half the width of the other heads' support: a scalar in raw
units has to grow to targets of 32, while Adam moves its weights as far in each step as theirs. C51 is two-hot there,
for there is no distribution to back up.

In the gridworld the values are known: *error* is the root mean squared error of max_a Q over states, *return* that of
the greedy policy, exactly evaluated, 0 being uniform actions and 1 the optimum. For SARSA *error* is that of Q over
states and actions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import studies
from rl import plot, statistics, train
from rl.agents import dqn, robust_vi
from rl.agents.optimisers import Adam
from rl.envs import tabular
from rl.envs.tabular import MDP
from rl.networks import mlp
from rl.replay import dataset
from rl.replay.dataset import Dataset
from rl.types import Array, Key, Learner, Spec, State, Transition
from rl.values import heads
from rl.values.heads import ValueHead

CONTROL = "softmax, squared error"
NAMES = (*heads.NAMES, CONTROL)
SCALED = "scalar, scaled"  # in the plasticity study

# The plasticity study.
PHASES = (0.0, 8.0, 16.0, 24.0, 32.0)  # b
FREQUENCY = 1e5  # m
SUPPORT, OUTPUTS = (-40.0, 40.0), 101
INPUTS, SIZE = 2048, 64  # inputs and their dimensions
TAIL = 100  # steps at the end of a phase over which its error is averaged
OFFSET_STEPS = 600  # in which a network without history fits the offset of the phase before
PARTS = ("plasticity", "noise", "sarsa", "linear", "widths", "rates")

# The gridworld.
GAMMA = 0.9
VALUES, BINS = (-1.0, 9.0), 51  # the support, wider than any value there is
STICKY = {"deterministic": 0.0, "sticky": 0.25}
NOISES = (0.0, 0.3, 1.0)  # eta
PAPER = "Stop Regressing (Farebrother et al., ICML 2024), "
FIGURES = {"sticky, eta 0": PAPER + "figure 15"}
ALIKE = "deterministic, eta 0"  # where HL-Gauss and squared error perform comparably in figure 15
MARGIN = 0.1  # of return, within which two heads are called comparable: our choice, made after the first runs
EXPECTED = "ours, expected before any run; the paper's figure 14 is about returns"
HARD = ("sticky", 1.0)  # where bins, widths and learning rates are varied
LINEAR = (("sticky", 0.0), HARD)  # where features are frozen
UNTRAINED = "untrained"  # features of a network that has learned nothing
ORDER = ("hl_gauss", "c51", "scalar")  # of the heads there, in the paper
SECOND = np.uint32(zlib.crc32(b"linear"))  # what its keys are folded with
PROBE_RATE = 1e-2  # of the linear Q in the beginning; it falls to 0
PROBES = ("the same head", "squared error")  # of the linear Q
HARDEST = f"{HARD[0].capitalize()}, eta {HARD[1]:g}"
BIN_COUNTS, WIDTHS = (31, 51, 101), (0.5, 0.75, 1.0, 2.0)  # a narrower Gaussian has biased labels
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SPEC = Spec((6,), 4, discrete=True)


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about these studies."""

    parts: str = ",".join(PARTS)  # which to run, comma-separated
    seeds: int = 6  # of each result
    phase_steps: int = 600  # gradient steps in each phase of the plasticity study (paper: 5,000)
    logged: int = 20_000  # logged steps in the gridworld, of uniform actions
    updates: int = 6000  # of each agent there
    hidden: int = 64  # width of its two layers there; 256 in the plasticity study
    rate: float = 1e-3  # learning rate of every head, where it is not varied
    seed: int = 0  # of all
    out: str = "results/papers/stop_regressing"


def run(settings: Settings) -> dict[str, Any]:
    """All studies, written to ``settings.out``; returns what result.json holds.

    Raises:
      ValueError: an unknown part, or fewer than 2 seeds.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    studies.check_seeds(settings.seeds)
    chosen, variants = studies.chosen(settings), {}
    of_phases = {**chosen, "phases": PHASES, "offset_steps": OFFSET_STEPS}
    if "plasticity" in parts:
        for name, (kind, history) in itertools.product(
            (*NAMES, SCALED), (("plasticity", True), ("fresh", False))
        ):
            variants[f"{kind}, {name}"] = studies.Variant(
                partial(plasticity, settings, name, history), of_phases
            )
    for name in NAMES:
        if "noise" in parts:
            for kind, eta in itertools.product(STICKY, NOISES):
                variants[f"{kind}, eta {eta:g}, {name}"] = studies.Variant(
                    partial(noise, settings, name, kind, eta), chosen
                )
        if "sarsa" in parts:
            for kind, eta in itertools.product(STICKY, NOISES):
                variants[f"sarsa, {kind}, eta {eta:g}, {name}"] = studies.Variant(
                    partial(noise, settings, name, kind, eta, sarsa=True), chosen
                )
        if "rates" in parts:
            variants[f"rates, {name}"] = studies.Variant(
                partial(learning_rates, settings, name), {**chosen, "rates": RATES}
            )
    if "linear" in parts:
        for (kind, eta), probe, name in itertools.product(LINEAR, PROBES, (*NAMES, UNTRAINED)):
            variants[f"linear, {kind}, eta {eta:g}, {probe}, {name}"] = studies.Variant(
                partial(frozen, settings, name, probe, kind, eta), chosen
            )
    if "widths" in parts:
        for bins, width in itertools.product(BIN_COUNTS, WIDTHS):
            name = f"{bins} bins, width {width:g}"
            variants[name] = studies.Variant(partial(widths, settings, bins, width), chosen)
    finished = studies.train(settings, variants, "runs")
    outcomes = finished.outcomes
    of_heads = lambda place: {name: outcomes[f"{place}, {name}"] for name in NAMES}
    places = [f"{kind}, eta {eta:g}" for kind, eta in itertools.product(STICKY, NOISES)]
    rows: dict[str, Any] = {"wall_seconds": finished.seconds}
    if "plasticity" in parts:
        rows |= {
            kind: of_heads(kind) | {SCALED: outcomes[f"{kind}, {SCALED}"]} for kind in ("plasticity", "fresh")
        }
    if "noise" in parts:
        rows["noise"] = {place: of_heads(place) for place in places}
    if "sarsa" in parts:
        rows["sarsa"] = {place: of_heads(f"sarsa, {place}") for place in places}
    if "linear" in parts:
        rows["linear"] = {
            f"{kind}, eta {eta:g}, {probe}": {
                name: outcomes[f"linear, {kind}, eta {eta:g}, {probe}, {name}"]
                for name in (*NAMES, UNTRAINED)
            }
            for (kind, eta), probe in itertools.product(LINEAR, PROBES)
        }
    if "widths" in parts:
        rows["widths"] = {name: row for name, row in outcomes.items() if " bins, width " in name}
    if "rates" in parts:
        rows["rates"] = of_heads("rates")
    result = studies.finish(settings, rows, report, claims, trained=finished)
    draw(settings, Path(settings.out), result)
    return result


# ---- heads -----------------------------------------------------------------------------------------------------


def make(name: str, low: float, high: float, size: int, width: float = 0.75) -> ValueHead:
    """A head of the library, HL-Gauss with a Gaussian of ``width`` bins, the control, or a scaled scalar."""
    if name == SCALED:
        return scaled((high - low) / 2)
    if name == CONTROL:
        return softmax_regression(low, high, size)
    if name == "hl_gauss":
        return heads.hl_gauss(low, high, size, width)
    return heads.make(name, low, high, size)


def scaled(factor: float) -> ValueHead:
    """A scalar whose value is ``factor`` times its output; targets and loss are in units of the value."""
    scalar = heads.scalar()
    return scalar._replace(
        value=lambda outputs: scalar.value(factor * outputs),
        target=lambda reward, discount, outputs: scalar.target(reward, discount, factor * outputs),
        loss=lambda outputs, target: scalar.loss(factor * outputs, target),
    )


def softmax_regression(low: float, high: float, size: int) -> ValueHead:
    """The mean of a softmax over bins, as HL-Gauss has it, trained like a scalar."""
    categorical, scalar = heads.hl_gauss(low, high, size), heads.scalar()

    def target(reward: Array, discount: Array, outputs: Array) -> Array:
        return scalar.target(reward, discount, categorical.value(outputs)[..., None])

    def loss(outputs: Array, target: Array) -> Array:
        return scalar.loss(categorical.value(outputs)[..., None], target)

    return categorical._replace(target=target, loss=loss)


# ---- targets that move -------------------------------------------------------------------------------------------


def plasticity(settings: Settings, name: str, history: bool, work: studies.Work) -> dict[str, Any]:
    """The mean squared error of one head's predictions on each batch, thinned [T, S], and after every phase.

    With a ``history`` one network fits all phases, one after another. Without, each phase has a new one, which has
    fitted the offset of the phase before and nothing else. Targets and batches are the same.
    """
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    one = partial(_fit_phases, make(name, *SUPPORT, OUTPUTS), settings.phase_steps, history)
    errors = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys)).T
    return {"curve": thinned(settings, errors), "phases": _phases(errors)}


def _fit_phases(head: ValueHead, steps: int, history: bool, key: Key) -> Array:
    keys = jax.random.split(key, 3)
    network, optimiser = mlp.state_value(head.size, (256, 256)), optax.adam(1e-3)
    teacher = mlp.state_value(1, (256, 256))
    inputs = jax.random.normal(keys[0], (INPUTS, SIZE))

    def fresh(key: Key) -> tuple[Any, Any]:
        params = network.init(key, inputs)
        return params, optimiser.init(params)

    def fit(carry: tuple[Any, Any], targets: Array, steps: int, key: Key) -> tuple[tuple[Any, Any], Array]:
        def step(carry: tuple[Any, Any], key: Key) -> tuple[tuple[Any, Any], Array]:
            params, moments = carry
            rows = jax.random.randint(key, (256,), 0, INPUTS)

            def loss(params: Any) -> tuple[Array, Array]:
                outputs = network.apply(params, inputs[rows])
                goal = heads.scalar_target(head, targets[rows])
                return head.loss(outputs, goal).mean(), jnp.square(head.value(outputs) - targets[rows]).mean()

            (_, error), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            change, moments = optimiser.update(gradient, moments, params)
            return (optax.apply_updates(params, change), moments), error

        return jax.lax.scan(step, carry, jax.random.split(key, steps))

    def phase(carry: tuple[Any, Any], now: tuple[Array, Array, Key]) -> tuple[tuple[Any, Any], Array]:
        before, offset, key = now
        teacher_key, key = jax.random.split(key)
        hidden = teacher.apply(teacher.init(teacher_key, inputs), inputs)[:, 0]
        if not history:
            start_key, offset_key = jax.random.split(jax.random.fold_in(key, 0))
            carry, _ = fit(fresh(start_key), jnp.full(INPUTS, before), OFFSET_STEPS, offset_key)
        return fit(carry, jnp.sin(FREQUENCY * hidden) + offset, steps, key)

    offsets = jnp.asarray((PHASES[0], *PHASES))
    now = offsets[:-1], offsets[1:], jax.random.split(keys[2], len(PHASES))
    return jax.lax.scan(phase, fresh(keys[1]), now)[1].reshape(-1)


def _phases(errors: np.ndarray) -> list[dict[str, Any]]:
    """The error at the end of every phase."""
    by_phase = errors.reshape(len(PHASES), -1, errors.shape[-1])
    return [statistics.summary(phase[-TAIL:].mean(0)) for phase in by_phase]


# ---- four rooms --------------------------------------------------------------------------------------------------


# One head in one setting: (four rooms, what is seen of their states, eta, learning rate, keys [S]) -> {score: [S]}
Agent = Callable[[MDP, Array, Array, Array, Key], dict[str, Array]]


def noise(
    settings: Settings, name: str, kind: str, eta: float, work: studies.Work, sarsa: bool = False
) -> dict[str, Any]:
    """One head with this much chance in rewards and dynamics."""
    return learn(settings, _agent(settings, name, sarsa), kind, eta)


def frozen(
    settings: Settings, name: str, probe: str, kind: str, eta: float, work: studies.Work
) -> dict[str, Any]:
    """A linear Q on the features that double DQN with one head has learned."""
    return learn(settings, _probe(settings, name, probe), kind, eta)


def learning_rates(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """One head at its best learning rate: chosen on seeds of their own, by the error."""
    others, train_and_score = dataclasses.replace(settings, seed=settings.seed + 1000), _agent(settings, name)
    tried = {rate: learn(others, train_and_score, *HARD, rate) for rate in RATES}
    best = min(tried, key=lambda rate: tried[rate]["error"]["mean"])
    score = learn(settings, train_and_score, *HARD, best)
    return {"tried": {f"{rate:g}": x for rate, x in tried.items()}, "rate": best, **score}


def widths(settings: Settings, bins: int, width: float, work: studies.Work) -> dict[str, Any]:
    """HL-Gauss by bins and width of the Gaussian in bins."""
    return learn(settings, agent(settings, make("hl_gauss", *VALUES, bins, width)), *HARD)


@functools.cache
def _agent(settings: Settings, name: str, sarsa: bool = False) -> Agent:
    """One program for all noises and learning rates."""
    return agent(settings, make(name, *VALUES, BINS), sarsa=sarsa)


@functools.cache
def _probe(settings: Settings, name: str, probe: str) -> Agent:
    """One program for all noises."""
    learned = name != UNTRAINED
    head = make(name if learned else "scalar", *VALUES, BINS)
    return agent(settings, head, probe=head if probe == PROBES[0] else heads.scalar(), learned=learned)


def learn(
    settings: Settings, train_and_score: Agent, kind: str, eta: float, rate: float | None = None
) -> dict[str, Any]:
    """A summary of every score over all seeds, each with a log of its own."""
    world, seen = tabular.four_rooms(STICKY[kind])
    keys = jax.random.split(jax.random.key(settings.seed + 1), settings.seeds)
    scores = train_and_score(world, seen, np.float32(eta), np.float32(rate or settings.rate), keys)
    return {name: statistics.summary(x) for name, x in scores.items()}


def agent(
    settings: Settings,
    head: ValueHead,
    *,
    sarsa: bool = False,
    probe: ValueHead | None = None,
    learned: bool = True,
) -> Agent:
    """Double DQN with ``head``: logs, learns and is scored, in one program.

    Args:
      settings: of its size and length.
      head: of its values.
      sarsa: continue with the logged next action.
      probe: of a linear Q on its features, which is scored in its place.
      learned: False: its features are those of its initial weights.
    """
    config = dqn.Config(discount=GAMMA, target_rate=0.02, hidden=(settings.hidden,) * 2, sarsa=sarsa)

    def fit(config: dqn.Config, spec: Spec, head: ValueHead, log: Dataset, keys: Key, updates: int) -> Any:
        learner = dqn.make(config, spec, head)
        epoch = train.scan_updates(learner.update, dataset.sampler(128), updates)
        state, _ = epoch(learner.init(keys[0], dataset.take(log, jnp.arange(1))), log, keys[1])
        return learner, state

    def one(world: MDP, best: Array, seen: Array, eta: Array, rate: Array, key: Key) -> tuple[Array, Array]:
        keys = jax.random.split(key, 3)
        log = logged(world, seen, eta, settings.logged, keys[0])
        chosen = dataclasses.replace(config, learning_rate=rate)
        learner, state = fit(chosen, SPEC, head, log, keys[1:], settings.updates if learned else 0)
        if probe is not None:
            see = standardised(
                partial(features, settings.hidden, state.params["q"]), log.transitions.observation
            )
            log, seen = over(log, see), see(seen)
            settling = Adam(schedule="cosine", decay_updates=settings.updates)
            linear = dataclasses.replace(
                config, hidden=(), learning_rate=PROBE_RATE, critic_optimiser=settling
            )
            again = jax.vmap(lambda key: jax.random.fold_in(key, SECOND))(keys[1:])
            spec = SPEC._replace(observation_shape=(settings.hidden,))
            learner, state = fit(linear, spec, probe, log, again, settings.updates)
        policy = jax.nn.one_hot(learner.act(state, seen, keys[2]), SPEC.action_size)
        # The noise adds the same to all values, and changes no policy.
        offset = eta / 2 / (1 - GAMMA)
        error = _error(world, best, learner, state, seen, offset, sarsa)
        return error, world.start @ tabular.evaluate(world, policy, GAMMA)

    @jax.jit
    def every(world: MDP, seen: Array, eta: Array, rate: Array, keys: Key) -> dict[str, Array]:
        best = robust_vi.value_iteration(world, GAMMA).value
        low, high = world.start @ tabular.evaluate(world, _uniform(world), GAMMA), world.start @ best
        error, earned = jax.lax.map(lambda key: one(world, best, seen, eta, rate, key), keys)
        return {"error": error, "return": (earned - low) / (high - low)}

    return every


def _uniform(world: MDP) -> Array:
    """The policy [S, A] of the logs."""
    return jnp.full(world.reward.shape, 1 / SPEC.action_size)


def _error(
    world: MDP, best: Array, learner: Learner, state: State, seen: Array, offset: Array, sarsa: bool
) -> Array:
    """Root mean squared, of max Q against ``best`` [S], or for SARSA of Q against that of uniform actions, []."""
    if not sarsa:
        assert learner.value is not None
        values = learner.value(state, seen, jax.random.key(0))  # it draws nothing
        return jnp.sqrt(jnp.square(values - best - offset).mean())
    assert learner.critics is not None
    q = [learner.critics(state, seen, jnp.full(len(seen), action))[0] for action in range(SPEC.action_size)]
    expected = world.reward + GAMMA * world.transition @ tabular.evaluate(world, _uniform(world), GAMMA)
    return jnp.sqrt(jnp.square(jnp.stack(q, -1) - expected - offset).mean())


def features(width: int, params: Any, seen: Array) -> Array:
    """The last hidden layer [..., width] of an agent's network, whose parameters these are."""
    # All of its layers but the last, and so without the last activation.
    trunk = mlp.state_value(width, (width,))
    return jax.nn.relu(trunk.apply({name: params[name] for name in ("Dense_0", "Dense_1")}, seen))


def standardised(see: Callable[[Array], Array], seen: Array) -> Callable[[Array], Array]:
    """Features with mean 0 and deviation 1 over ``seen``, so that one learning rate is the same step for all heads."""
    mean, deviation = see(seen).mean(0), see(seen).std(0)
    scale = jnp.where(deviation > 1e-6, 1 / jnp.maximum(deviation, 1e-6), 0.0)  # units may never be active
    return lambda observation: scale * (see(observation) - mean)


def over(log: Dataset, see: Callable[[Array], Array]) -> Dataset:
    """The log with observations as ``see`` has them."""
    steps = log.transitions
    return log._replace(
        transitions=steps._replace(
            observation=see(steps.observation), next_observation=see(steps.next_observation)
        )
    )


def logged(world: MDP, seen: Array, eta: Array, count: int, key: Key) -> Dataset:
    """``count`` steps from states and actions drawn uniformly, with noise U(0, eta) on their rewards."""
    keys = jax.random.split(key, 4)
    next_key = jax.random.fold_in(key, 4)  # none of these, which are those of 0 to 3
    state = jax.random.randint(keys[0], (count,), 0, len(world.start))
    action = jax.random.randint(keys[1], (count,), 0, SPEC.action_size)
    cumulative = jnp.cumsum(world.transition[state, action], -1)
    draw = jax.random.uniform(keys[2], (count, 1)) * cumulative[:, -1:]
    following = (cumulative > draw).argmax(-1)
    steps = Transition(
        observation=seen[state],
        action=action,
        reward=world.reward[state, action] + eta * jax.random.uniform(keys[3], (count,)),
        discount=jnp.ones(count),
        next_observation=seen[following],
        next_action=jax.random.randint(next_key, (count,), 0, SPEC.action_size),
        has_next_action=jnp.ones(count),
    )
    return Dataset(steps, jnp.ones(count, bool))


# ---- reports ------------------------------------------------------------------------------------------------------


def draw(settings: Settings, out: Path, result: Mapping[str, Any]) -> None:
    """The plasticity study over time, and the error against the noise for both kinds of dynamics."""
    every, root = _every(settings), {}
    for name, row in result.get("plasticity", {}).items():
        root[name] = (every * np.arange(1, len(row["curve"]) + 1), 0.5 * np.log10(row["curve"]))
    if root:
        plot.learning_curve(
            out / "plasticity.png",
            root,
            ylabel="log10 of the root mean squared error",
            title="Targets that jump by 8 in every phase",
            xlabel="gradient steps",
        )
    for what, kind in itertools.product(("error", "return"), STICKY if "noise" in result else ()):
        places = [result["noise"][f"{kind}, eta {eta:g}"] for eta in NOISES]
        plot.lines(
            out / f"{kind}_{what}.png",
            {name: (NOISES, *studies.bands(by[name][what] for by in places)) for name in NAMES},
            xlabel="eta: rewards carry noise U(0, eta)",
            ylabel="error of max Q" if what == "error" else "return of the greedy policy",
            title=f"Four rooms, {kind} actions",
        )


def thinned(settings: Settings, errors: np.ndarray) -> np.ndarray:
    """About twenty points of each phase [T, S], means over the steps [steps, S] between them."""
    every = _every(settings)
    points = len(errors) // every
    return errors[: points * every].reshape(points, every, -1).mean(1)


def _every(settings: Settings) -> int:
    return max(1, settings.phase_steps // 20)


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """HL-Gauss against the squared error, where the paper compares them, and against two-hot."""
    noise, phases = result.get("noise", {}), result.get("plasticity", {})
    for other in ("scalar", SCALED, "two_hot"):
        if other in phases:
            last = {name: phases[name]["phases"][-1]["each"] for name in ("hl_gauss", other)}
            text = (
                f"targets that jump: HL-Gauss has a smaller error than {other} in the last phase (difference)"
            )
            source = PAPER + "figure 17" if other == "scalar" else studies.OURS
            yield studies.Claim(text, source, last[other] - last["hl_gauss"], studies.positive)
        for place, by in noise.items() if other in NAMES else ():
            gain = by["hl_gauss"]["return"]["each"] - by[other]["return"]["each"]
            if other == "scalar" and place == ALIKE:
                yield _alike(f"four rooms, {place}", PAPER + "figure 15", gain)
                continue
            text = f"four rooms, {place}: HL-Gauss returns more than {other} (difference)"
            source = FIGURES.get(place, studies.OURS) if other == "scalar" else studies.OURS
            yield studies.Claim(text, source, gain, studies.positive)
    if "fresh" in result:
        yield from _history_claims(phases, result["fresh"])
    yield from _sarsa_claims(result.get("sarsa", {}), noise)
    yield from _linear_claims(result.get("linear", {}))
    loudest = f"eta {max(NOISES):g}"
    errors = {f"{place}, one learning rate": by for place, by in noise.items() if place.endswith(loudest)}
    if "rates" in result:
        errors[f"{HARD[0]}, eta {HARD[1]:g}, each at its own learning rate"] = result["rates"]
    for place, by in errors.items():
        text = f"four rooms, {place}: HL-Gauss has a smaller error than scalar (difference)"
        fewer = by["scalar"]["error"]["each"] - by["hl_gauss"]["error"]["each"]
        yield studies.Claim(text, EXPECTED, fewer, studies.positive)
    for kind in STICKY if noise else ():
        quiet, loud = (noise[f"{kind}, eta {eta:g}"] for eta in (min(NOISES), max(NOISES)))
        lost = {name: quiet[name]["return"]["each"] - loud[name]["return"]["each"] for name in quiet}
        text = f"four rooms, {kind}: noise takes less return from HL-Gauss than from a scalar (difference)"
        yield studies.Claim(text, PAPER + "figure 14", lost["scalar"] - lost["hl_gauss"], studies.positive)


def _sarsa_claims(sarsa: Mapping[str, Any], noise: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """HL-Gauss against the squared error, and how far its lead is that of double DQN."""
    lead = lambda by: by["hl_gauss"]["return"]["each"] - by["scalar"]["return"]["each"]
    for place, by in sarsa.items():
        yield _alike(f"four rooms, SARSA, {place}", PAPER + "figure 18", lead(by))
    for place in (place for place in sarsa if place in noise):
        text = f"four rooms, {place}: HL-Gauss leads a scalar by less with SARSA than with double DQN (difference)"
        less = lead(noise[place]) - lead(sarsa[place])
        yield studies.Claim(text, PAPER + "figure 18", less, studies.positive)


def _alike(place: str, source: str, lead: np.ndarray) -> studies.Claim:
    """What the paper says where HL-Gauss has no lead."""
    text = f"{place}: HL-Gauss returns as much as scalar, within {MARGIN:g} (difference)"
    alike = studies.mean_within(-MARGIN, MARGIN)
    return studies.Claim(text, f"{source}: they perform comparably; the margin is ours", lead, alike)


def _linear_claims(linear: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """The paper's order of the heads whose features are frozen."""
    for place, by in linear.items():
        for better, worse in itertools.combinations([name for name in ORDER if name in by], 2):
            text = f"four rooms, {place}: a linear Q returns more on features of {better} than of {worse} (difference)"
            gain = by[better]["return"]["each"] - by[worse]["return"]["each"]
            yield studies.Claim(text, PAPER + "figure 16", gain, studies.positive)


def _history_claims(phases: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """Whether networks lose the ability to fit, by head: the error with a history against that without, as logs."""
    published = {
        "scalar": PAPER + "figure 17: so it is with squared error",
        "hl_gauss": PAPER + "figure 17: it is not so with cross-entropy",
    }
    last = lambda row: np.log(row["phases"][-1]["each"])
    cost = {name: last(row) - last(fresh[name]) for name, row in phases.items()}
    for name, each in cost.items():
        text = f"targets that jump: {name} fits the last phase worse with a history than without (log of the ratio)"
        yield studies.Claim(text, published.get(name, studies.OURS), each, studies.positive)
    text = "targets that jump: a history costs a scalar more than HL-Gauss (difference of these logs)"
    yield studies.Claim(text, PAPER + "figure 17", cost["scalar"] - cost["hl_gauss"], studies.positive)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """What came out, in words that the numbers allow and tables."""
    settings = result["settings"]
    yield "# The synthetic studies of Stop Regressing"
    yield (
        f"`{result['command']}`; means over {settings['seeds']} seeds and Student's 95 % intervals. "
        f"{studies.program(result, __file__)} says what is measured."
    )
    if "plasticity" in result:
        yield "## Targets that jump: root of the mean squared error at the end of each phase"
        yield f"{settings['phase_steps']:,} updates in each phase (paper: 5,000)."
        yield _phase_table(result["plasticity"])
    if "fresh" in result:
        yield "## The same without history"
        yield (
            f"In every phase a network with new initial weights, which has fitted the offset of the phase before for "
            f"{OFFSET_STEPS} updates, and nothing else. Plasticity is lost where the errors above are larger."
        )
        yield _phase_table(result["fresh"])
    if "noise" in result:
        yield from _score_tables("Four rooms", "max Q", result["noise"])
    if "sarsa" in result:
        yield from _score_tables("SARSA in four rooms", "Q", result["sarsa"])
    if "linear" in result:
        yield from _score_tables("A linear Q on frozen features", "max Q", result["linear"])
    if "rates" in result:
        yield from _rates_report(result["rates"])
    if "widths" in result:
        yield from _widths_report(result["widths"])


def _phase_table(rows: Mapping[str, Any]) -> str:
    phases = [(name, *map(_root, row["phases"])) for name, row in rows.items()]
    return studies.table(("head", *(f"b = {b:g}" for b in PHASES)), phases)


def _score_tables(title: str, values: str, by_place: Mapping[str, Any]) -> Iterator[str]:
    """The errors and the returns of all heads in all places."""
    names = list(next(iter(by_place.values())))
    for what, of in (("error", f"error of {values}"), ("return", "return of the greedy policy")):
        yield f"## {title}: {of}"
        yield studies.table(
            ("head", *by_place),
            [(name, *(studies.plus_minus(by[name][what]) for by in by_place.values())) for name in names],
        )


def _rates_report(rates: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {HARDEST}: each head at its own learning rate"
    rows = []
    for name in NAMES:
        tried = (f"{rate}: {studies.plus_minus(x['error'])}" for rate, x in rates[name]["tried"].items())
        scores = [studies.plus_minus(rates[name][what]) for what in ("error", "return")]
        rows.append((name, *scores, f"{rates[name]['rate']:g}", ", ".join(tried)))
    yield studies.table(("head", "error", "return", "rate", "tried, on other seeds: error"), rows)


def _widths_report(rows: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {HARDEST}: error of HL-Gauss by bins and width of the Gaussian in bins"
    error = lambda bins, width: rows[f"{bins} bins, width {width:g}"]["error"]
    yield studies.table(
        ("bins", *(f"{width:g}" for width in WIDTHS)),
        [(bins, *(studies.plus_minus(error(bins, width)) for width in WIDTHS)) for bins in BIN_COUNTS],
    )


def _root(summary: Mapping[str, Any]) -> str:
    low, high = (np.sqrt(max(0.0, x)) for x in summary["ci95"])
    return f"{np.sqrt(summary['mean']):.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    studies.main(Settings(), run)
