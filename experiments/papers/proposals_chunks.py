"""The parts of `experiments.papers.proposals` on chunks of actions: small problems whose answers are enumerated.

- chain: six states in a row, two actions, chunks of four: all sixteen from every state. The critic of chunks should
  have the value that enumeration gives, also of chunks that terminate before their last action. The log goes on after a
  termination in one copy of such a chunk, and ends there in another.
- n_step: states on a circle, and a behaviour that repeats one random direction. Returns over several steps without
  chunks take the direction's return for that of a policy that decides in each step: they are off by an amount that
  enumeration gives. One step, and chunks, are not.
- discounts: a corridor with a reward of -1 in each step, and the two discounts of DEAS: the fixed point of every head
  is known, and longer chunks should be there after fewer updates.
- aggregation: targets of ensembles of critics against the formula; and how often a policy (ReBRAC's) picks actions that
  nobody logged, where critics guess.

Batches are whole logs, so that nothing is drawn at random but parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import studies
from rl import train
from rl.agents import deas, ifql, iql, rebrac
from rl.agents.optimisers import Adam
from rl.networks.layers import Architecture
from rl.replay import chunks
from rl.replay import dataset as replay
from rl.replay.dataset import Dataset
from rl.types import Learner, Spec, State, Transition
from rl.values import bellman, heads

PIECES = 10  # steps of the progress bar, and points of a curve, in each training
OURS = "our prediction"
TOLERANCE = 1e-3

# The chain: what going left and right pays in each state; to the right of the last one is the end.
STATES, LENGTH, GAMMA = 6, 4, 0.9
PAID = np.float32([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.2], [0.0, -0.3], [0.6, 0.1], [-0.1, 1.0]])
LOW, HIGH = (
    -1.5,
    4.0,
)  # of categorical heads: values are from 0.1 to 2.4, and C51 must hold single returns, too
KAPPA = 0.01  # of the quantile head

# The circle: what arriving in each state pays.
ARRIVAL = np.float32([1.0, -1.0, 0.5, 0.0, 2.0, -0.5])

# The corridor.
CORRIDOR, WITHIN, BEYOND = 100, 0.9, 0.999  # steps; discounts within chunks, and from chunk to chunk
CHUNKS = (1, 4, 8)

# The bandit with a gap: actions in [-1, 1], logged but in the middle, towards which rewards rise.
GAP = 0.4
GAPPED = 128  # rows of the data around the gap
ENSEMBLES = tuple(itertools.product((2, 10), bellman.AGGREGATIONS))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What can be chosen about these parts."""

    chunk_seeds: int = 3  # of the parts on chunks
    chunk_updates: int = 6_000  # of each agent in the parts on chunks


def variants(settings: Any, parts: list[str], names: list[str]) -> dict[str, studies.Variant]:
    """What these parts train, by name."""
    work: dict[str, Callable[..., Any]] = {}
    for name in names:
        if "chain" in parts:
            work[f"chain, {name}"] = functools.partial(of_chain, settings, name)
        if "discounts" in parts:
            work[f"discounts, {name}"] = functools.partial(of_discounts, settings, name)
    for part, function in (("n_step", of_n_step), ("aggregation", of_aggregation)):
        if part in parts:
            work[part] = functools.partial(function, settings)
    depends = {"updates": settings.chunk_updates, "seeds": settings.chunk_seeds, "seed": settings.seed}
    runs = {"discounts": len(CHUNKS), "n_step": 3, "aggregation": len(ENSEMBLES)}
    return {
        name: studies.Variant(function, depends, PIECES * runs.get(name.partition(",")[0], 1))
        for name, function in work.items()
    }


def value_head(name: str, low: float, high: float) -> heads.ValueHead:
    """With 51 outputs; of categorical heads on that support."""
    return heads.quantile(51, KAPPA) if name == "quantile" else heads.make(name, low, high, 51)


def trained(
    settings: Any, make: Callable[[Any], Learner], config: Any, batch: Transition, work: studies.Work
) -> Iterator[tuple[int, State]]:
    """The seeds of an agent together, after each piece of its training: how many updates, and their states [S]."""
    each = settings.chunk_updates // PIECES
    runs = train.population(make, config, lambda whole, key, step: whole, each)
    keys = jax.random.split(jax.random.key(settings.seed), settings.chunk_seeds)
    batch = jax.device_put(batch)
    state, epoch = jax.jit(runs.init)(keys, batch), jax.jit(runs.epoch, donate_argnums=0)
    for piece in range(1, PIECES + 1):
        state, epoch_report = epoch(state, batch, keys)
        train.check_finite(epoch_report)
        work.progress(1)
        yield piece * each, state


def shared(settings: Any, *networks: str) -> dict[str, Any]:
    """Hyper-parameters of every agent: small, without LayerNorm, with learning rates that fall to 0."""
    falling = Adam("cosine", settings.chunk_updates + 1)
    return {
        "learning_rate": 3e-3,  # with 1e-2 quantiles of long chunks do not settle
        "hidden": (64, 64),
        "layer_norm": False,
        "network": Architecture(activation="tanh", initialiser="glorot"),
        **{f"{name}_optimiser": falling for name in networks},
    }


def implicit(settings: Any, agent: Any, **fields: Any) -> Any:
    """Of an agent with IQL's value: the mean over what was logged, and one critic that its copy follows at once."""
    of_all = {"expectile": 0.5, "critics": 1, "target_rate": 0.1}
    acting = "policy" if agent is iql else "flow"
    return agent.Config(**shared(settings, "critic", "value", acting), **of_all, **fields)


def log(steps: list[tuple[int, float, float, int, float, bool]], states: int) -> Dataset:
    """Of (state, action, reward, next state, discount, last); ``states`` of them, shown one-hot."""
    state, action, reward, following, discount, last = (np.array(x) for x in zip(*steps, strict=True))
    shown = np.eye(states, dtype=np.float32)
    action = action.astype(np.float32)[:, None]
    after = np.where(last[:, None], action, np.roll(action, -1, 0))
    columns = (shown[state], action, np.float32(reward), np.float32(discount), shown[following], after)
    return Dataset(Transition(*columns, np.float32(~last)), last)


def whole(chunked: chunks.Chunks) -> Transition:
    """All chunks that may be drawn, as one batch."""
    return chunks.take(chunked, chunked.starts)


# ---- the chain ----------------------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """What a chunk comes to."""

    paid: float  # its discounted return
    end: int | None  # the state after it; None where it terminated
    steps: list[tuple[int, float, float, int, float, bool]]  # up to there


def walk(state: int, actions: tuple[int, ...]) -> Walk:
    """A chunk of actions -1 and 1 on the chain."""
    paid, steps = 0.0, []
    for k, action in enumerate(actions):
        reward = float(PAID[state, (action + 1) // 2])
        paid += GAMMA**k * reward
        over = state == STATES - 1 and action == 1
        following = min(max(state + action, 0), STATES - 1)
        steps.append((state, float(action), reward, following, float(not over), False))
        if over:
            return Walk(paid, None, steps)
        state = following
    return Walk(paid, state, steps)


def every_chunk() -> list[tuple[int, tuple[int, ...]]]:
    """Each state with each of the sixteen chunks."""
    return [
        (state, actions) for state in range(STATES) for actions in itertools.product((-1, 1), repeat=LENGTH)
    ]


def chain() -> Dataset:
    """An episode of each; where one terminates early, another of it in which the log goes on from the left end."""
    steps: list[tuple[int, float, float, int, float, bool]] = []
    for state, actions in every_chunk():
        path = walk(state, actions).steps
        steps += [*path[:-1], (*path[-1][:5], True)]
        rest = actions[len(path) :]
        if rest:
            went_on = [*path, *walk(0, rest).steps]
            steps += [*went_on[:-1], (*went_on[-1][:5], True)]
    return log(steps, STATES)


def enumerated(batch: Transition) -> np.ndarray:
    """The value of each of `every_chunk` for a policy that draws the chunks of a batch, by walking the chain."""
    logged = [
        (int(np.argmax(state)), tuple(int(a) for a in action))
        for state, action in zip(np.asarray(batch.observation), np.asarray(batch.action), strict=True)
    ]
    value = np.zeros(STATES)
    worth = lambda state, actions: (
        (w := walk(state, actions)).paid + (0.0 if w.end is None else GAMMA**LENGTH * value[w.end])
    )
    for _ in range(100):
        q = [(state, worth(state, actions)) for state, actions in logged]
        value = np.array([np.mean([x for state, x in q if state == s]) for s in range(STATES)])
    return np.array([worth(state, actions) for state, actions in every_chunk()])


def of_chain(settings: Any, name: str, work: studies.Work) -> dict[str, Any]:
    """The largest error of the critic, [S]: of chunks that terminate early, and of the others."""
    batch = whole(chunks.make(chain(), LENGTH, GAMMA))
    config = implicit(settings, ifql, discount=GAMMA)
    head, spec = value_head(name, LOW, HIGH), chunks.spec(Spec((STATES,), 1), LENGTH)
    make = lambda config: ifql.make(config, spec, head)
    *_, (_, states) = trained(settings, make, config, batch, work)
    pairs = every_chunk()
    shown = np.eye(STATES, dtype=np.float32)[[state for state, _ in pairs]]
    actions = np.float32([actions for _, actions in pairs])
    q = jax.jit(jax.vmap(make(config).critics, (train.STACKED, None, None)))(states, shown, actions)
    error = np.abs(np.asarray(q)[:, 0] - enumerated(batch))
    early = np.array([len(walk(*one).steps) < LENGTH for one in pairs])
    return {"early": error[:, early].max(1), "others": error[:, ~early].max(1)}


# ---- n-step returns -----------------------------------------------------------------------------------------------


def circle() -> Dataset:
    """From each state as many steps as a chunk has in each direction; then a time limit."""
    steps: list[tuple[int, float, float, int, float, bool]] = []
    for start, direction in itertools.product(range(STATES), (-1, 1)):
        for k in range(LENGTH):
            state = (start + k * direction) % STATES
            following = (state + direction) % STATES
            paid = float(ARRIVAL[following])
            steps.append((state, float(direction), paid, following, 1.0, k == LENGTH - 1))
    return log(steps, STATES)


def fixed_point(batch: Transition) -> np.ndarray:
    """The mean of the targets of each state and direction [STATES, 2], where values are means over the batch."""
    state, following = (np.asarray(x).argmax(-1) for x in (batch.observation, batch.next_observation))
    direction = (np.asarray(batch.action)[:, 0] > 0).astype(int)
    q = np.zeros((STATES, 2))
    for _ in range(200):
        value = np.array([q[s, direction[state == s]].mean() for s in range(STATES)])
        target = np.asarray(batch.reward) + GAMMA * np.asarray(batch.discount) * value[following]
        for s, d in itertools.product(range(STATES), range(2)):
            q[s, d] = target[(state == s) & (direction == d)].mean()
    return q


def deciding(length: int) -> np.ndarray:
    """Exact values [STATES, 2] of a direction for ``length`` steps, and a random one after each ``length``."""
    value = np.zeros(STATES)
    for _ in range(200):
        q = np.zeros((STATES, 2))
        for s, d in itertools.product(range(STATES), range(2)):
            path = [(s + k * (2 * d - 1)) % STATES for k in range(1, length + 1)]
            q[s, d] = sum(GAMMA**k * ARRIVAL[x] for k, x in enumerate(path)) + GAMMA**length * value[path[-1]]
        value = q.mean(1)
    return q


def of_n_step(settings: Any, work: studies.Work) -> dict[str, Any]:
    """Largest errors [S] of one step, several steps, and chunks; and what enumeration says of several steps."""
    logged, spec = circle(), Spec((STATES,), 1)
    several = replay.n_step(logged, LENGTH, GAMMA).transitions
    batches = {
        "one": (logged.transitions, 1),
        "several": (several, 1),
        "chunks": (whole(chunks.make(logged, LENGTH, GAMMA)), LENGTH),
    }
    errors: dict[str, Any] = {}
    for name, (batch, length) in batches.items():
        config = implicit(settings, iql, discount=GAMMA)
        make = lambda config, n=length: iql.make(config, chunks.spec(spec, n), heads.scalar())
        *_, (_, states) = trained(settings, make, config, batch, work)
        shown = np.repeat(np.eye(STATES, dtype=np.float32), 2, 0)
        actions = np.tile(np.float32([[-1], [1]]), (STATES, length))
        q = jax.jit(jax.vmap(make(config).critics, (train.STACKED, None, None)))(states, shown, actions)
        q = np.asarray(q)[:, 0].reshape(-1, STATES, 2)
        errors[name] = np.abs(q - deciding(length)).max((1, 2))
        if name == "several":
            errors["several, explained"] = np.abs(q - fixed_point(several)).max((1, 2))
    errors["bias"] = float(np.abs(fixed_point(several) - deciding(1)).max())
    return errors


# ---- two discounts ------------------------------------------------------------------------------------------------


def corridor() -> Dataset:
    """One walk along it, to its end."""
    last = CORRIDOR - 1
    steps = [(s, 1.0, -1.0, min(s + 1, last), float(s < last), s == last) for s in range(CORRIDOR)]
    return log(steps, CORRIDOR)


def smdp(length: int) -> np.ndarray:
    """What DEAS's value is at each place: ``-sum_j g2^(jH) (1 - g1^m_j) / (1 - g1)`` over chunks of m_j <= H steps."""
    values = np.zeros(CORRIDOR + 1)
    for place in range(CORRIDOR - 1, -1, -1):
        steps = min(length, CORRIDOR - place)
        rest = BEYOND**length * values[place + length] if place + length < CORRIDOR else 0.0
        values[place] = -(1 - WITHIN**steps) / (1 - WITHIN) + rest
    return values[:-1]


def of_discounts(settings: Any, name: str, work: studies.Work) -> dict[str, Any]:
    """{chunk: the largest error of V as a share of the range of values [S], and after how many updates it is 10 %}."""
    logged, by_length = corridor(), {}
    for length in CHUNKS:
        batch = whole(chunks.make(logged, length, BEYOND, WITHIN))
        head = value_head(name, *chunks.value_bounds(logged, length, BEYOND, WITHIN))
        spec = chunks.spec(Spec((CORRIDOR,), 1), length)
        config = implicit(settings, deas, discount=BEYOND, chunk_discount=WITHIN)
        make = lambda config, spec=spec, head=head: deas.make(config, spec, head)
        value: Any = make(config).value
        say = jax.jit(jax.vmap(value, (train.STACKED, None, None)))
        exact = smdp(length)
        errors, updates = [], []
        for count, states in trained(settings, make, config, batch, work):
            v = np.asarray(say(states, np.eye(CORRIDOR, dtype=np.float32), jax.random.key(0)))
            errors.append(np.abs(v - exact).max(1) / np.ptp(exact))
            updates.append(count)
        late = np.array(errors) > 0.1  # [T, S]
        after = [
            next((n for n, x in zip(updates, column, strict=True) if not x), np.inf) for column in late.T
        ]
        by_length[str(length)] = {"error": errors[-1], "updates": np.array(after, float)}
    return by_length


# ---- aggregation --------------------------------------------------------------------------------------------------


def gapped(seed: int) -> Transition:
    """One state; rewards rise towards the middle of the actions, which is not logged."""
    rng = np.random.default_rng(seed)
    action = np.float32(rng.choice([-1, 1], GAPPED) * rng.uniform(GAP, 1, GAPPED))
    paid = np.float32(1 - np.abs(action) + rng.normal(0, 0.3, GAPPED))
    state, ones = np.zeros((GAPPED, 1), np.float32), np.ones(GAPPED, np.float32)
    return Transition(state, action[:, None], paid, ones, state, action[:, None], 0 * ones)


def of_aggregation(settings: Any, work: studies.Work) -> dict[str, Any]:
    """{critics and aggregation: the largest error of the target's value [S], and whether the policy is in the gap}."""
    rows, batch, state = {}, gapped(settings.seed), np.zeros((1, 1), np.float32)
    for count, aggregation in ENSEMBLES:
        fields = shared(settings, "critic", "policy") | {"hidden": (32, 32), "learning_rate": 1e-3}
        config = rebrac.Config(
            **fields, critics=count, aggregation=aggregation, discount=0.5, policy_noise=0.0,
            critic_cloning=0.0, policy_cloning=1e-3,
        )  # fmt: skip
        make = lambda config: rebrac.make(config, Spec((1,), 1), heads.scalar())
        *_, (_, states) = trained(settings, make, config, batch, work)
        learner = make(config)

        def ask(state_of: State, learner: Any = learner) -> tuple[Any, ...]:
            slow = state_of._replace(params=state_of.target)
            action = learner.act(slow, state, jax.random.key(0))
            says = learner.value(state_of, state, jax.random.key(0)), learner.critics(slow, state, action)
            return *says, learner.act(state_of, state, jax.random.key(0))

        value, members, action = jax.jit(jax.vmap(ask, (train.STACKED,)))(states)
        q = np.float64(members)[..., 0]  # [S, E]
        formula = {"min": q.min(1), "mean": q.mean(1)}
        formula["pessimistic"] = q.mean(1) - config.deviations * np.sqrt(
            ((q - q.mean(1, keepdims=True)) ** 2).mean(1)
        )
        rows[f"{count} {aggregation}"] = {
            "error": np.abs(np.asarray(value)[:, 0] - formula[aggregation]),
            "in the gap": (np.abs(np.asarray(action)[:, 0, 0]) < GAP).astype(float),
        }
    return rows


# ---- what may be said ---------------------------------------------------------------------------------------------


def results(finished: Mapping[str, Any]) -> dict[str, Any]:
    """{part: what came out of it} of the outcomes of `variants`."""
    parts: dict[str, Any] = {}
    for name, outcome in finished.items():
        part, _, head = name.partition(", ")
        if part in ("n_step", "aggregation"):
            parts[part] = outcome
        elif part in ("chain", "discounts"):
            parts.setdefault(part, {})[head] = outcome
    return parts


def tolerance(head: str) -> float:
    """The quantile head keeps the mean of random targets up to this; the others exactly (`heads.quantile`)."""
    return (HIGH - LOW) / (2 * 51) + KAPPA if head == "quantile" else TOLERANCE


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What enumeration predicts, of the parts that were run."""
    every = studies.every
    for head, errors in result.get("chain", {}).items():
        most = tolerance(head)
        for which, text in (
            ("early", "chunks that terminate before their last action"),
            ("others", "all others"),
        ):
            claim = f"{head}: the critic has the enumerated value of {text} (error, to {most:.3g})"
            yield studies.Claim(claim, OURS, errors[which], every(lambda x, m=most: x < m))
    if "n_step" in result:
        errors = result["n_step"]
        text = f"several steps without chunks are off by what enumeration says, {errors['bias']:.3g} (error, to 1e-3)"
        yield studies.Claim(text, OURS, errors["several, explained"], every(lambda x: x < TOLERANCE))
        text = "... which is at least ten times the error of one step, and of chunks (difference)"
        ahead = errors["several"] - 10 * np.maximum(errors["one"], errors["chunks"])
        yield studies.Claim(
            text, "QC's curves: 9 against 66 per cent on cube-double", ahead, studies.positive
        )
        text = "chunks have no such error (to 1e-3)"
        yield studies.Claim(text, OURS, errors["chunks"], every(lambda x: x < TOLERANCE))
    for head, by_length in result.get("discounts", {}).items():
        for length, row in by_length.items():
            text = f"{head}, chunks of {length}: V is the fixed point of two discounts (error, to 2 % of its range)"
            yield studies.Claim(text, OURS, row["error"], every(lambda x: x < 0.02))
        first, last = (by_length[str(n)]["updates"] for n in (min(CHUNKS), max(CHUNKS)))
        text = f"{head}: chunks of {max(CHUNKS)} are within 10 % after fewer updates than single actions (share saved)"
        # Seeds that are never there with single actions count as there at the end: what is saved is at least that.
        saved = 1 - last / np.minimum(first, result["settings"]["chunk_updates"])
        yield studies.Claim(text, "DEAS (2026), in words", saved, every(lambda x: x > 0))
    for name, row in result.get("aggregation", {}).items():
        text = f"{name}: the value of a target is that of the formula (error, to 1e-6)"
        yield studies.Claim(text, "the formula, in float64", row["error"], every(lambda x: x < 1e-6))


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report, of the parts that were run."""
    if "chain" in result:
        yield "## Sixteen chunks on a chain"
        yield "Largest error of the critic, over all states and chunks."
        rows = [
            (head, *(studies.between(errors[x], ".2g") for x in ("early", "others")))
            for head, errors in result["chain"].items()
        ]
        yield studies.table(("", "of chunks that terminate early", "of the others"), rows)
    if "n_step" in result:
        errors = result["n_step"]
        yield "## Several steps, with chunks and without"
        yield (
            "Largest error of the critic against the exact value of what it decides. Enumeration says "
            f"{errors['bias']:.4g} of several steps without chunks."
        )
        words = {"one": "one step", "several": f"{LENGTH} steps", "chunks": f"chunks of {LENGTH}"}
        yield studies.table(
            ("", "error"), [(text, studies.between(errors[x], ".2g")) for x, text in words.items()]
        )
    if "discounts" in result:
        yield "## Two discounts"
        yield "Error of V as a share of its range, and after how many updates it is 10 %."
        rows = [
            (head, length, studies.between(row["error"], ".2g"), f"{np.mean(row['updates']):,.0f}")
            for head, by_length in result["discounts"].items()
            for length, row in by_length.items()
        ]
        yield studies.table(("", "chunk", "error", "updates to 10 %"), rows)
    if "aggregation" in result:
        yield "## Aggregation"
        yield "How often the policy is where nothing was logged, and critics guess."
        rows = [
            (name, f"{np.mean(row['in the gap']):.0%}", f"{np.max(row['error']):.1e}")
            for name, row in result["aggregation"].items()
        ]
        yield studies.table(("critics", "in the gap", "error of the target's value"), rows)
