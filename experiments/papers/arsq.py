"""What ARSQ's Q-function is, and what its conditioning is for (Liu et al., ICML 2025): identities, a toy and a bandit.

    python -m experiments.papers.arsq
    python -m experiments.papers.arsq --parts=bandit --bandit_seeds=20

All parts train the agents of this library, `rl.agents.arsq` and `rl.agents.cqn`, by their own updates. There is one
observation and episodes have one step, so that the Q-function to be learned is the reward itself.

- identities: with random networks, by enumeration of all actions. ``alpha log sum_a exp(Q / alpha)`` is V; advantages
  of tokens sum to the soft advantage (theorem 4.3); bins that are greedy one after another are the best action where
  tokens are independent, and need not be where they are not.
- tabular: the four actions of the paper's tabular figure. Which four actions its numbers belong to is our reading
  (``a_1`` changes last; the other reading mirrors everything). The log holds each once, with the published joint Q as
  its reward.
- toy: the paper's one-step problem with two dimensions, in which Q is learned from 2,000 points, drawn uniformly and
  around one optimal, two sub-optimal and two negative modes. Where those are and what they are worth is not published:
  here they are ours (`MODES`), and so is the unit of the error. What can be compared is the order of the methods and
  how many times larger one error is than another.
- bandit: a problem of ours, after the paper's motivating figure. Three modes, of which the best is the rarest; actions
  that are good one dimension at a time are not good together. For both BC terms and several weights of them.

Two things are called *independent dimensions*. ``independent dimensions`` is ARSQ whose tokens do not see other
dimensions (``see_dimensions=False``): Q is a sum of one function for each dimension. ``per-dimension Q`` is CQN with
one level and a scalar head: one Q-function for each dimension, each the mean reward given that dimension's bin, which
is what the paper says of its predecessors. ``cqn`` is the same with levels: dimensions see each other's coarser bins.
The value of an action is their mean over dimensions and levels. In the bandit CQN's two terms for demonstrations have
the weight that the BC term of ARSQ has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from experiments import studies
from rl import keys as streams
from rl import plot, train
from rl.agents import arsq, cqn
from rl.networks.autoregressive import soft_dueling
from rl.replay import dataset
from rl.replay.dataset import Dataset
from rl.replay.source import Source
from rl.types import Array, Key, Learner, Spec, State, Transition
from rl.values import bellman, coarse, heads

PARTS = ("identities", "tabular", "toy", "bandit")
SPEC = Spec((1,), 2)  # one observation, two dimensions
PIECES = 20  # measurements of a training run
ALPHA = 0.01  # the temperature, but in the identities

# The identities: two levels of three bins in two dimensions are 81 actions.
IDENTITIES: dict[str, dict[str, Any]] = {
    "all before": {},
    "all before, dimension by dimension": {"order": "dimension"},
    "no coarser levels": {"see_levels": False},
    "no other dimensions": {"see_dimensions": False},
    "nothing": {"see_levels": False, "see_dimensions": False},
}
WARM = 0.7  # a temperature at which many actions count
OBSERVATIONS = 100  # of each random network
PRECISION = 1e-4  # of the range of Q: what float32 leaves of an identity

# The toy: the reward is a sum of normal bumps of this deviation.
MODES = (  # where, how high
    ((0.5, 0.5), 10.0),  # optimal
    ((-0.5, -0.5), 5.0),  # sub-optimal
    ((0.0, 0.0), 3.0),
    ((0.5, -0.5), -10.0),  # negative
    ((-0.5, 0.5), -10.0),
)
DEVIATION = 0.25
NEAR = 0.5  # share of points around modes, equally many around each, with the deviation of the bump

# The bandit.
BANDIT = (  # where, reward, share
    ((0.8, 0.8), 1.0, 0.1),
    ((-0.8, -0.8), 0.1, 0.4),
    ((0.8, -0.8), -1.0, 0.5),
)
NOISE = 0.05  # of logged actions
BINS = 5
WEIGHTS = (0.0, 0.03, 0.1, 0.3, 1.0)  # of the BC term
JUDGED = 0.1  # the weight of the claims
CLIPS = {"cql": -1.0, "margin": 0.0}  # c of each BC term

Make = Callable[[Mapping[str, Array]], Learner]  # of hyper-parameters that runs differ in


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about these studies."""

    parts: str = ",".join(PARTS)  # which to run, comma-separated
    seeds: int = 5  # of identities, tabular and toy
    points: int = 2_000  # of the toy's log
    test_points: int = 1_000  # on which the toy's error is measured
    levels: int = 2  # in the toy
    bins: int = 7  # in the toy; without coarse-to-fine there are bins^levels
    updates: int = 4_000  # of the toy
    batch_size: int = 128  # of the toy
    hidden: tuple[int, ...] = (64, 64)  # widths of the toy's networks
    learning_rate: float = 3e-3  # of the toy
    bandit_seeds: int = 6  # of the bandit, at each weight
    bandit_points: int = 1_000  # of its log
    bandit_batch_size: int = 256  # of the bandit; tabular has its whole log in each batch
    bandit_updates: int = 3_000  # of the bandit and of tabular
    bandit_hidden: tuple[int, ...] = (16,)  # widths of their networks
    bandit_learning_rate: float = 1e-2  # of both
    seed: int = 0  # of all
    out: str = "results/papers/arsq"


def run(settings: Settings) -> dict[str, Any]:
    """Runs the parts, and writes and returns what came out.

    Raises:
      ValueError: an unknown part, too few seeds, or updates that measurements do not divide.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    studies.check_seeds(settings.seeds)
    if settings.bandit_seeds < 2:
        raise ValueError(f"--bandit_seeds={settings.bandit_seeds}: a share of seeds needs at least 2")
    for flag in ("updates", "bandit_updates"):
        if getattr(settings, flag) % PIECES:
            raise ValueError(
                f"--{flag}={getattr(settings, flag)} must be a multiple of {PIECES}, the number of measurements"
            )
    studied: dict[str, tuple[Any, Any, int]] = {
        "identities": (IDENTITIES, identities, 1),
        "tabular": (TABULAR, tabular, PIECES),
        "toy": (TOY, toy, PIECES),
        "bandit": (METHODS, bandit, PIECES),
    }
    variants = {
        f"{part}, {name}": studies.Variant(partial(function, settings, name), studies.chosen(settings), steps)
        for part, (names, function, steps) in studied.items()
        if part in parts
        for name in names
    }
    trained = studies.train(settings, variants, "toys of ARSQ")
    outcomes: dict[str, dict[str, Any]] = {part: {} for part in PARTS if part in parts}
    for name, outcome in trained.outcomes.items():
        part, _, method = name.partition(", ")
        outcomes[part][method] = outcome
    result = studies.finish(
        settings, {"wall_seconds": trained.seconds, **outcomes}, report, claims, trained=trained
    )
    draw(Path(settings.out), result)
    return result


# ---- what all parts share ------------------------------------------------------------------------------------------


def one_step(action: Array, reward: Array) -> Dataset:
    """A log of episodes with one step, all from the same observation."""
    count = len(reward)
    seen, none = jnp.ones((count, 1)), jnp.zeros(count)
    return Dataset(Transition(seen, action, reward, none, seen, action, none), jnp.ones(count, bool))


def everything(log: Dataset, key: Key, step: Array | int = 0) -> Transition:
    """The source of batches that hold the whole log."""
    del key, step
    return log.transitions


def learnt(
    make: Make, hypers: Mapping[str, Array], logs: Dataset, source: Source, updates: int, run_keys: Key
) -> Iterator[State]:
    """The states [R] of runs with a key, hyper-parameters and a log of their own, `PIECES` times in ``updates``.

    All runs are one program. What is compiled and what is sampled is `rl.train`'s.
    """

    def start(key: Key, hyper: Mapping[str, Array], log: Dataset) -> State:
        return make(hyper).init(key, log.transitions)

    def one(
        state: State, of_run: tuple[Mapping[str, Array], Dataset], key: Key
    ) -> tuple[State, train.Report]:
        hyper, log = of_run
        return train.scan_updates(make(hyper).update, source, updates // PIECES)(state, log, key)

    states = jax.jit(jax.vmap(start, out_axes=train.STACKED))(streams.of(run_keys, "init"), hypers, logs)
    epoch: Any = jax.vmap(one, (train.STACKED, 0, 0), (train.STACKED, 0))
    runs: Any = (hypers, logs)
    for state, _ in train.epochs(epoch, states, runs, run_keys, PIECES):
        yield state


def scorer(learner: Learner) -> Callable[[State, Array], tuple[Array, Array]]:
    """(states [R], actions [N, D] or [R, N, D]) -> Q [R, N], the mean over members, and greedy actions [R, D]."""

    def one(state: State, action: Array) -> tuple[Array, Array]:
        assert learner.critics is not None
        q = learner.critics(state, jnp.ones((len(action), 1)), action).mean(0)
        return q, learner.act(state, jnp.ones(1), jax.random.key(0))

    def of_runs(state: State, action: Array) -> tuple[Array, Array]:
        return jax.vmap(one, (train.STACKED, 0 if action.ndim == 3 else None))(state, action)

    return jax.jit(of_runs)


def make_arsq(hyper: Mapping[str, Array], **fields: Any) -> Learner:
    return arsq.make(arsq.Config(**{"temperature": ALPHA, **fields, **hyper}), SPEC, heads.scalar())


def make_cqn(hyper: Mapping[str, Array], **fields: Any) -> Learner:
    """CQN with a scalar head; ``bc_weight`` is the weight of its margin and of its dominance term."""
    fields |= hyper
    weight = fields.pop("bc_weight")
    config = cqn.Config(
        margin_weight=weight, dominance_weight=weight, features=0, slow_policy=False, **fields
    )
    return cqn.make(config, SPEC, heads.scalar())


INDEPENDENT, PER_DIMENSION, JOINT, FLAT = (
    "independent dimensions", "per-dimension Q", "arsq", "without coarse-to-fine"
)  # fmt: skip


# ---- identities ----------------------------------------------------------------------------------------------------


def identities(settings: Settings, name: str, work: studies.Work) -> dict[str, np.ndarray]:
    """One number per seed: the largest errors of the identities, and how often greedy bins are not the best action.

    ``value``: of ``alpha log sum_a exp(Q / alpha)`` as V. ``advantage``: of the advantage of a token as what the
    actions below its bin are worth softly, less what those below the bins before are worth. ``sum``: of all tokens'
    advantages as the soft advantage. All in shares of the range of Q over actions. ``path``: the share of observations
    where the agent's action is not greedy in the enumerated advantages; ``apart``: where it is not the best action.
    """
    del work
    switches = IDENTITIES[name]
    grid, hidden = coarse.Grid(2, 3), (16,)
    tokens = coarse.tokens(grid, 2, **switches)
    base, length = grid.bins, tokens.size
    sequences = np.array(list(itertools.product(range(base), repeat=length)))
    bins = np.zeros((len(sequences), grid.levels, 2), np.int32)
    bins[:, tokens.level, tokens.dimension] = sequences
    actions = coarse.decode(grid, jnp.asarray(bins))
    config = arsq.Config(
        levels=2, bins=base, temperature=WARM, hidden=hidden, critics=1, bc_weight=0.0, **switches
    )
    spec = Spec((3,), 2)
    learner = arsq.make(config, spec, heads.scalar())
    network = soft_dueling(
        spec, 1, arsq.TRUNKS["shared"](tokens), base, hidden, architecture=config.network, members=1
    )

    def one(key: Key) -> tuple[Array, ...]:
        """Q [N, O] of all actions, V [O], tokens' advantages [N, O, T], and greedy actions [O, D]."""
        observation = jax.random.normal(key, (OBSERVATIONS, 3))
        like, tree = jax.tree.flatten(jax.eval_shape(network.init, key, observation))
        keys = jax.random.split(jax.random.fold_in(key, 1), len(like))
        params = {"q": tree.unflatten(jax.random.normal(k, x.shape) for k, x in zip(keys, like, strict=True))}
        state = State(params, params, (), jnp.int32(0))
        every = jnp.broadcast_to(actions[:, None], (len(actions), OBSERVATIONS, 2))
        assert learner.critics is not None and learner.value is not None
        cells = coarse.cell(grid, every)
        u = network.both(params["q"], observation, coarse.contexts(tokens, cells))[1]
        advantage = bellman.of_bins(bellman.soft_advantage(u, WARM), coarse.chosen(tokens, cells))
        return (
            learner.critics(state, observation, every)[0],
            learner.value(state, observation, key),
            advantage[0],
            learner.act(state, observation, key),
        )

    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    q, v, advantage, act = (np.asarray(x, float) for x in jax.jit(jax.vmap(one))(keys))
    q, advantage = np.moveaxis(q, 1, 2), np.moveaxis(advantage, 1, 2)  # [S, O, N], [S, O, N, T]
    # What the actions below all sequences of t bins are worth softly, [S, O, B^t].
    worth = [
        WARM * special.logsumexp(q.reshape(*q.shape[:2], base**t, -1) / WARM, axis=-1)
        for t in range(length + 1)
    ]
    error, path = np.zeros(q.shape[:2]), np.zeros(q.shape[:2], int)
    for t in range(length):
        enumerated_advantage = worth[t + 1].reshape(*worth[t].shape, base) - worth[t][..., None]
        below = np.repeat(enumerated_advantage.reshape(*q.shape[:2], -1), base ** (length - t - 1), -1)
        error = np.maximum(error, np.abs(advantage[..., t] - below).max(-1))
        best = np.take_along_axis(enumerated_advantage, path[..., None, None], -2)[..., 0, :].argmax(-1)
        path = path * base + best
    known = np.asarray(actions)
    differs = lambda index: (np.abs(known[index] - act).max(-1) > 1e-6).mean(-1)
    spread = np.ptp(q, axis=-1)
    return {
        "value": (np.abs(worth[0][..., 0] - v) / spread).max(-1),
        "advantage": (error / spread).max(-1),
        "sum": (np.abs(advantage.sum(-1) - (q - worth[0])).max(-1) / spread).max(-1),
        "path": differs(path),
        "apart": differs(q.argmax(-1)),
    }


# ---- the tabular figure --------------------------------------------------------------------------------------------

CORNERS = np.array(
    list(itertools.product((-0.5, 0.5), repeat=2))
)  # the centres of two bins in two dimensions
TABULAR: dict[str, Callable[..., Learner]] = {
    JOINT: make_arsq,
    INDEPENDENT: partial(make_arsq, see_dimensions=False),
    PER_DIMENSION: make_cqn,
}


def tabular(settings: Settings, name: str, work: studies.Work) -> dict[str, np.ndarray]:
    """Q of the four actions [S, 4], and the index [S] of the greedy one, after learning the published joint Q."""
    published = studies.published("arsq")["tabular"]["joint"]
    logs = one_step(jnp.asarray(CORNERS, jnp.float32), jnp.asarray(published))
    logs = jax.tree.map(lambda x: jnp.broadcast_to(x, (settings.seeds, *x.shape)), logs)
    make = partial(TABULAR[name], levels=1, bins=2, bc_weight=0.0, **_small(settings))
    state = _last(settings, make, {}, logs, everything, work)
    q, action = scorer(make({}))(state, jnp.asarray(CORNERS, jnp.float32))
    return {"q": np.asarray(q), "greedy": (np.asarray(action) > 0) @ [2, 1]}


def additive(values: Any) -> np.ndarray:
    """The least-squares fit of Q(a_1) + Q(a_2) to the values [4] of four actions that are logged equally often."""
    return 2 * marginal(values) - np.mean(values)


def marginal(values: Any) -> np.ndarray:
    """The mean over both dimensions of the mean value given that dimension's bin, [4] of four such actions."""
    table = np.asarray(values, float).reshape(2, 2)
    return ((table.mean(1)[:, None] + table.mean(0)) / 2).reshape(-1)


EXACT = {  # what each learns from the joint Q
    JOINT: ("the joint Q", np.asarray),
    INDEPENDENT: ("the least-squares sum", additive),
    PER_DIMENSION: ("the mean of both dimensions' means", marginal),
}
CLOSE = 0.03  # a tenth of what the best action is better than the next


def _small(settings: Settings) -> dict[str, Any]:
    return {"hidden": settings.bandit_hidden, "learning_rate": settings.bandit_learning_rate}


def _last(
    settings: Settings,
    make: Make,
    hypers: Mapping[str, Array],
    logs: Dataset,
    source: Source,
    work: studies.Work,
) -> State:
    """The states [R] of runs on logs [R, ...], after all updates."""
    run_keys = jax.random.split(jax.random.key(settings.seed), len(logs.last))
    for state in learnt(make, hypers, logs, source, settings.bandit_updates, run_keys):
        last = state
        work.progress(1)
    return last


# ---- the toy -------------------------------------------------------------------------------------------------------

TOY = {
    JOINT: make_arsq,
    FLAT: make_arsq,
    INDEPENDENT: partial(make_arsq, see_dimensions=False),
    PER_DIMENSION: make_cqn,
    "cqn": make_cqn,
}
_ONE_LEVEL = (FLAT, PER_DIMENSION)


def reward(action: Array) -> Array:
    """The toy's reward [...] of actions [..., 2]."""
    where, height = (jnp.asarray(x, jnp.float32) for x in zip(*MODES, strict=True))
    square = jnp.square(action[..., None, :] - where).sum(-1)
    return (height * jnp.exp(-square / (2 * DEVIATION**2))).sum(-1)


def toy_log(key: Key, points: int) -> Dataset:
    """Points that are uniform, and points around modes, without noise in their rewards."""
    keys = jax.random.split(key, 4)
    where = jnp.asarray([mode for mode, _ in MODES])[jax.random.randint(keys[0], (points,), 0, len(MODES))]
    near = jnp.clip(where + DEVIATION * jax.random.normal(keys[1], (points, 2)), -1, 1)
    uniform = jax.random.uniform(keys[2], (points, 2), minval=-1.0, maxval=1.0)
    action = jnp.where(jax.random.uniform(keys[3], (points, 1)) < NEAR, near, uniform)
    return one_step(action, reward(action))


def toy(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """Mean squared errors of Q on uniform points, at each measurement [PIECES, S] and others [S]; and a picture of it.

    ``error``: at the end; ``early``: after a quarter of the updates; ``unexplained``: at the end, as a share of the
    reward's variance. ``reward`` is that of the greedy action.
    """
    levels, bins = settings.levels, settings.bins
    if name in _ONE_LEVEL:
        levels, bins = 1, bins**levels
    fields: dict[str, Any] = {"hidden": settings.hidden, "learning_rate": settings.learning_rate}
    if TOY[name] is not make_cqn:
        fields["critics"] = 1  # nothing is bootstrapped
    make = partial(TOY[name], levels=levels, bins=bins, bc_weight=0.0, **fields)
    log_key, test_key, run_key = jax.random.split(jax.random.key(settings.seed), 3)
    draw_logs = jax.vmap(lambda key: toy_log(key, settings.points))
    test = jax.random.uniform(test_key, (settings.seeds, settings.test_points, 2), minval=-1.0, maxval=1.0)
    true, score, errors = reward(test), scorer(make({})), []
    for state in learnt(
        make, {}, draw_logs(jax.random.split(log_key, settings.seeds)), dataset.sampler(settings.batch_size),
        settings.updates, jax.random.split(run_key, settings.seeds),
    ):  # fmt: skip
        q, greedy = score(state, test)
        errors.append(np.square(np.asarray(q - true, float)).mean(-1))
        work.progress(1)
    picture = np.asarray(score(state, _square(PIXELS))[0][0]).reshape(PIXELS, PIXELS)
    variance = np.var(np.asarray(true, float), axis=-1)
    return {
        "curve": np.stack(errors),
        "error": errors[-1],
        "early": errors[(PIECES - 1) // 4],
        "unexplained": errors[-1] / variance,
        "reward": np.asarray(reward(greedy)),
        "picture": picture.round(3),
    }


PIXELS = 50


def _square(pixels: int) -> Array:
    """The centres [pixels^2, 2] of pixels of [-1, 1]^2, the second dimension changing first: rows are a_2."""
    line = (jnp.arange(pixels) + 0.5) / pixels * 2 - 1
    second, first = jnp.meshgrid(line, line, indexing="ij")
    return jnp.stack([first, second], -1).reshape(-1, 2)


# ---- the bandit ----------------------------------------------------------------------------------------------------

METHODS = {
    **{
        f"{name}, {bc}": partial(make_arsq, bc=bc, bc_clip=clip, see_dimensions=name == JOINT)
        for name in (JOINT, INDEPENDENT)
        for bc, clip in CLIPS.items()
    },
    PER_DIMENSION: make_cqn,
}


def bandit_log(key: Key, points: int) -> Dataset:
    """Actions around modes."""
    keys = jax.random.split(key)
    where, rewards, share = (jnp.asarray(x) for x in zip(*BANDIT, strict=True))
    mode = jax.random.choice(keys[0], len(BANDIT), (points,), p=share)
    action = jnp.clip(where[mode] + NOISE * jax.random.normal(keys[1], (points, 2)), -1, 1)
    return one_step(action, rewards[mode])


def bandit(settings: Settings, name: str, work: studies.Work) -> dict[str, np.ndarray]:
    """The greedy bins [W, S, 2] at each weight, all weights and seeds in one program."""
    seeds, weights = settings.bandit_seeds, len(WEIGHTS)
    log_keys = jax.random.split(jax.random.key(settings.seed + 1), seeds)
    logs = jax.vmap(lambda key: bandit_log(key, settings.bandit_points))(log_keys)
    logs = jax.tree.map(lambda x: jnp.tile(x, (weights, *[1] * (x.ndim - 1))), logs)
    hypers = {"bc_weight": jnp.repeat(jnp.asarray(WEIGHTS), seeds)}
    make = partial(METHODS[name], levels=1, bins=BINS, **_small(settings))
    state = _last(settings, make, hypers, logs, dataset.sampler(settings.bandit_batch_size), work)
    action = scorer(make({"bc_weight": jnp.float32(0)}))(state, jnp.zeros((1, 2)))[1]
    return {"greedy": np.asarray(coarse.cell(coarse.Grid(1, BINS), action)).reshape(weights, seeds, 2)}


def best_bins() -> np.ndarray:
    """The bins [2] of the mode with the largest reward."""
    where = max(BANDIT, key=lambda mode: mode[1])[0]
    return np.asarray(coarse.cell(coarse.Grid(1, BINS), jnp.asarray(where)))


def optimal(outcome: Mapping[str, Any], weight: float) -> np.ndarray:
    """Whether [S] each seed's greedy action is the best one."""
    return (outcome["greedy"][WEIGHTS.index(weight)] == best_bins()).all(-1)


# ---- reports -------------------------------------------------------------------------------------------------------

PAPER = "ARSQ (Liu et al., ICML 2025), "
OURS = "our bandit, after the paper's motivating figure"


def counted(test: Callable[[float], bool]) -> studies.Predicate:
    """Of the share of seeds in which something is so."""
    return lambda seeds: (bool(test(float(seeds.mean()))), f"{seeds.sum():.0f} of {len(seeds)}")


all_seeds, no_seed, some_fail = counted(lambda x: x == 1), counted(lambda x: x == 0), counted(lambda x: x < 1)


def within_three(published: float) -> studies.Predicate:
    """Every seed is within a factor of three of what was published."""
    return studies.every(lambda x: (published / 3 <= x) & (x <= published * 3))


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper says, and what the bandit was built to show."""
    if "identities" in result:
        yield from _identities_claims(result["identities"])
    if "tabular" in result:
        yield from _tabular_claims(result["tabular"])
    if "toy" in result:
        yield from _toy_claims(result["toy"])
    if "bandit" in result:
        yield from _bandit_claims(result["bandit"])


def _identities_claims(rows: Mapping[str, Any]) -> Iterator[studies.Claim]:
    exact, none = studies.every(lambda error: error < PRECISION), studies.every(lambda share: share == 0)
    some = studies.every(lambda share: share > 0)
    worst = {what: np.max([row[what] for row in rows.values()], axis=0) for what in rows["nothing"]}
    for what, text, where in (
        ("value", "alpha log sum_a exp(Q / alpha) is V", "section 4.1"),
        ("sum", "tokens' advantages sum to the soft advantage", "theorem 4.3"),
        ("advantage", "each token's advantage is what enumeration says", "theorem 4.3"),
    ):
        text = f"{text} (largest error over all conditionings, in ranges of Q, below {PRECISION:g})"
        yield studies.Claim(text, PAPER + where, worst[what], exact)
    text = "acting follows the greedy path of the enumerated advantages (share of observations where not)"
    yield studies.Claim(text, "our agent", worst["path"], none)
    text = "independent tokens: the greedy path is the best action (share of observations where not)"
    yield studies.Claim(text, "by construction", rows["nothing"]["apart"], none)
    text = f"tokens that see all before: at temperature {WARM} it need not be (the same share)"
    yield studies.Claim(text, "by construction", rows["all before"]["apart"], some)


def _tabular_claims(rows: Mapping[str, Any]) -> Iterator[studies.Claim]:
    published = studies.published("arsq")["tabular"]
    source = PAPER + "tabular figure"
    for name, row in rows.items():
        text = f"four actions: {name} learns {EXACT[name][0]} (largest error, below {CLOSE:g})"
        off = np.abs(row["q"] - EXACT[name][1](published["joint"])).max(-1)
        where = source if name == JOINT else "closed form"
        yield studies.Claim(text, where, off, studies.every(lambda error: error < CLOSE))
        whose = "joint" if name == JOINT else "independent"
        best = int(np.argmax(published[whose]))
        text = f"four actions: {name} acts {_corner(best)}, the best action of the published {whose} Q"
        yield studies.Claim(text, source, row["greedy"] == best, all_seeds)


def _corner(index: int) -> str:
    return f"({index // 2}, {index % 2})"


def _toy_claims(rows: Mapping[str, Any]) -> Iterator[studies.Claim]:
    error = {name: row["error"] for name, row in rows.items()}
    published = {name: x[0] for name, x in studies.published("arsq")["error"].items()}
    published[PER_DIMENSION] = published[INDEPENDENT]
    for better, worse in ((JOINT, FLAT), (FLAT, INDEPENDENT), (FLAT, PER_DIMENSION)):
        if better in rows and worse in rows:
            text = f"toy: {better} has a smaller error than {worse} (difference)"
            where = f"{PAPER}one-step problem; {published[better]:.2f} against {published[worse]:.2f}"
            yield studies.Claim(text, where, error[worse] - error[better], studies.positive)
    if FLAT in rows:
        text = f"toy: {JOINT} has a smaller error than {FLAT} after a quarter of the updates (difference)"
        early = rows[FLAT]["early"] - rows[JOINT]["early"]
        yield studies.Claim(text, "ours: the paper has errors at the end", early, studies.positive)
    for name in (INDEPENDENT, PER_DIMENSION):
        if name in rows:
            ratio = published[name] / published[JOINT]
            text = (
                f"toy: the error of {name}, in errors of {JOINT}, is within a factor of three of the published, in "
                "every seed"
            )
            where = f"{PAPER}one-step problem; {studies.digits(ratio)}"
            yield studies.Claim(text, where, error[name] / error[JOINT], within_three(ratio))


def _bandit_claims(rows: Mapping[str, Any]) -> Iterator[studies.Claim]:
    for name, row in rows.items():
        conditioned = name.startswith(JOINT)
        expected = ("every", all_seeds) if conditioned else ("no", no_seed)
        text = f"bandit: {name}, acts optimally in {expected[0]} seed at BC weight {JUDGED:g}"
        yield studies.Claim(text, OURS, optimal(row, JUDGED), expected[1])
        if conditioned:
            text = f"bandit: {name}, does not act optimally in every seed at BC weight 1"
            yield studies.Claim(text, OURS, optimal(row, 1.0), some_fail)


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """What came out, in tables."""
    settings = result["settings"]
    yield "# ARSQ: identities, a toy and a bandit"
    yield (
        f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores. "
        f"{studies.program(result, __file__)} says what is compared, what is published and what is ours."
    )
    if "identities" in result:
        yield from _identities_report(result["identities"], settings)
    if "tabular" in result:
        yield from _tabular_report(result["tabular"])
    if "toy" in result:
        yield from _toy_report(result["toy"], settings)
    if "bandit" in result:
        yield from _bandit_report(result["bandit"], settings)


def _identities_report(rows: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    yield "## Identities, by enumeration"
    yield (
        f"Random networks, {settings['seeds']} seeds with {OBSERVATIONS} observations each, 81 actions, temperature "
        f"{WARM}. The largest errors of all, in ranges of Q over actions; and shares of observations. Where tokens see "
        "what was chosen before them, the first bins are chosen by what they are worth softly, over all that may "
        "follow, which is not by the best action."
    )
    largest = {"value": "V", "sum": "sum of advantages", "advantage": "each advantage"}
    shares = {"path": "acts off the greedy path", "apart": "greedy path is not the best action"}
    yield studies.table(
        ("tokens see", *largest.values(), *shares.values()),
        [
            (
                name,
                *(f"{row[what].max():.1e}" for what in largest),
                *(f"{row[what].mean():.1%}" for what in shares),
            )
            for name, row in rows.items()
        ],
    )


def _tabular_report(rows: Mapping[str, Any]) -> Iterator[str]:
    published = studies.published("arsq")["tabular"]
    yield "## Four actions: the paper's tabular figure"
    yield (
        "Q of each action, mean over seeds, after learning from a log that holds every action once, with the published "
        "joint Q as its reward. The published independent Q was not learned from this log: what it shares with ours "
        "is its best action."
    )
    values = {name: (row["q"].mean(0), row["greedy"]) for name, row in rows.items()}
    exact = {
        f"closed form: {what}": of(published["joint"])
        for what, of in (EXACT[INDEPENDENT], EXACT[PER_DIMENSION])
    }
    for name, q in {**exact, **{f"published: {name}": q for name, q in published.items()}}.items():
        values[name] = (np.asarray(q), [np.argmax(q)])
    yield studies.table(
        ("", *(_corner(index) for index in range(4)), "acts"),
        [
            (
                name,
                *(f"{x:.2f}" for x in q),
                ", ".join(_corner(index) for index in sorted({*map(int, greedy)})),
            )
            for name, (q, greedy) in values.items()
        ],
    )


def _toy_report(rows: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    published = studies.published("arsq")["error"]
    yield "## Toy: the error of Q"
    yield (
        f"Mean squared error on {settings['test_points']:,} uniform points after {settings['updates']:,} updates on "
        f"{settings['points']:,} points, mean over {settings['seeds']} seeds and half of Student's 95 % interval; its "
        "share of the reward's variance; how many times ARSQ's error it is, the median over seeds; the error after a "
        "quarter of the updates; and the "
        f"reward of the greedy action, of which the largest is {MODES[0][1]:g}. ARSQ has {settings['levels']} levels "
        f"of {settings['bins']} bins, those with one level {settings['bins'] ** settings['levels']} bins. The "
        "published errors are of other modes in another unit; compare orders and ratios. "
        "What the paper calls independent is compared with both of ours."
    )
    ours = rows[JOINT]["error"]
    cells = []
    for name, row in rows.items():
        mean, deviation = published.get(name, (None, None))
        cells.append((
            name, studies.plus_minus(row["error"]), f"{row['unexplained'].mean():.2%}",
            studies.digits(float(np.median(row["error"] / ours))), studies.plus_minus(row["early"]),
            studies.extremes(row["reward"]),
            "" if mean is None else f"{mean:.2f} ± {deviation:.2f}",
            "" if mean is None else studies.digits(mean / published[JOINT][0]),
        ))  # fmt: skip
    head = (
        "", "error", "of the variance", "times ARSQ's", "after a quarter", "greedy action's reward", "published",
        "times ARSQ's",
    )  # fmt: skip
    yield studies.table(head, cells)
    yield "![error against updates](toy_error.png)\n\n![Q on the square](toy_q.png)"


def _bandit_report(rows: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    seeds = settings["bandit_seeds"]
    yield "## Bandit: seeds with the best greedy action"
    yield (
        f"Of {seeds} seeds, by the weight of the BC term, after {settings['bandit_updates']:,} updates on "
        f"{settings['bandit_points']:,} logged actions, in batches of {settings['bandit_batch_size']}; c of the BC "
        "term is "
        + " and ".join(f"{clip:g} for {bc}" for bc, clip in CLIPS.items())
        + ". In brackets the greedy bins of the others, of five in each dimension: (0, 0) is the sub-optimal mode, "
        "(4, 0) the worst mode, and (0, 4) was never logged."
    )
    yield studies.table(
        ("BC weight", *(f"{weight:g}" for weight in WEIGHTS)),
        [(name, *(_cell(row, weight) for weight in WEIGHTS)) for name, row in rows.items()],
    )
    yield "![share of seeds with the best action](bandit.png)"


def _cell(row: Mapping[str, Any], weight: float) -> str:
    """How many seeds act best, and what the others do."""
    greedy, best = row["greedy"][WEIGHTS.index(weight)], optimal(row, weight)
    others = sorted({f"({a}, {b})" for a, b in greedy[~best]})
    return f"{best.sum()}" + (f" [{', '.join(others)}]" if others else "")


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """The toy's errors over updates and its Q-functions, and the bandit's sweep."""
    if "toy" in result:
        rows = result["toy"]
        steps = result["settings"]["updates"] // PIECES * np.arange(1, PIECES + 1)
        plot.learning_curve(
            folder / "toy_error.png",
            {name: (steps, np.log10(row["curve"])) for name, row in rows.items()},
            ylabel="log10 of the mean squared error of Q",
            title=f"One step, two dimensions: Q from {result['settings']['points']:,} points",
        )
        true = np.asarray(reward(_square(PIXELS))).reshape(PIXELS, PIXELS)
        pictures = {"reward": true, **{name: row["picture"] for name, row in rows.items()}}
        high = max(height for _, height in MODES)
        plot.maps(
            folder / "toy_q.png",
            pictures,
            1.0,
            (-high, high),
            title="Q of the first seed over both dimensions",
        )
    if "bandit" in result:
        shares = {
            name: np.array([optimal(row, weight).mean() for weight in WEIGHTS])
            for name, row in result["bandit"].items()
        }
        nothing = np.full(len(WEIGHTS), np.nan)
        apart = 0.012 * (np.arange(len(shares)) - (len(shares) - 1) / 2)  # most lines lie on each other
        plot.lines(
            folder / "bandit.png",
            {
                name: (WEIGHTS, share + shift, nothing, nothing)
                for shift, (name, share) in zip(apart, shares.items(), strict=True)
            },
            xlabel="weight of the BC term",
            ylabel="share of seeds with the best action",
            title="Bandit whose best mode is its rarest",
            note=f"{result['settings']['bandit_seeds']} seeds at each weight, lines\nmoved apart by 0.012",
            rate=True,
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
