"""Policies that propose, and critics that choose: what each can do where the best answer is known.

    python -m experiments.papers.proposals

- bandit: one state, actions in the square [-1, 1]^2, logged around four modes. The best one has a tenth of the data,
  and between modes the reward is small. A Gaussian policy clones the mean of all; a flow clones the modes
  (`rl.networks.flow`). The best of N draws is of the best mode if one of them is, with probability ``1 - 0.9^N``, as
  far as the flow has the shares of the data and the critic ranks the modes. A policy that is distilled from the flow
  and ascends the critic (FQL) should earn more than the flow.

- chain, n_step, discounts, aggregation: small problems on chunks of actions and ensembles of critics, whose answers are
  enumerated (`experiments.papers.proposals_chunks`).

Batches of the bandit are drawn from the distribution itself, so that agents alone can err. All value heads are run;
Gaussian cloning has none.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from experiments.papers import proposals_chunks
from rl import plot, statistics, train
from rl.agents import bc, fql, ifql
from rl.agents.optimisers import Adam
from rl.networks import mlp
from rl.types import Array, Key, Learner, Spec, State, Transition
from rl.values import heads

PARTS = ("bandit", "chain", "n_step", "discounts", "aggregation")
PIECES = 10  # steps of the progress bar in each training

# The bandit: where the modes are, how much of the data each has, and what it pays at its centre.
MODES = np.float32([[0.5, 0.5], [-0.5, 0.5], [-0.5, -0.5], [0.5, -0.5]])
SHARES = np.float32([0.1, 0.3, 0.3, 0.3])
WORTH = np.float32([10.0, 6.0, 4.0, 2.0])
DEVIATION = 0.1  # of the data around a mode
REACH = 0.35  # of the reward around a mode: up to there the best mode pays more than any other
NOISE = 1.0  # deviation of a logged reward
NEAR = 0.35  # an action is of a mode if it is no farther away, as 99.8 % of its data are
BEST = 0
SPEC = Spec((1,), 2)

GAUSSIAN, FLOW, DISTILLED = "Gaussian cloning", "flow", "distilled"
OURS = "our prediction"


@dataclasses.dataclass(frozen=True)
class Settings(proposals_chunks.Sizes, studies.Settings):
    """What can be chosen about this study; what does not begin with chunk is of the bandit."""

    parts: str = ",".join(PARTS)  # which to run, comma-separated
    heads: str = ",".join(heads.NAMES)  # of the critics, comma-separated
    seeds: int = 5
    updates: int = 10_000  # of each agent
    batch_size: int = 256
    learning_rate: float = 1e-3
    hidden: tuple[int, ...] = (64, 64)  # widths of every network's layers
    flow_steps: int = 10
    integrator: str = "midpoint"  # of flows; with euler, as published, a tenth of the draws lie between modes
    candidates: tuple[int, ...] = (1, 4, 16, 32)  # N
    alpha: float = 1.0  # of FQL, whose Q is divided by its mean size
    atoms: int = 51  # of the categorical heads, on [-5, 15]
    draws: int = 4_000  # actions by which a policy is judged
    seed: int = 0  # of all
    out: str = "results/papers/proposals"


def run(settings: Settings) -> dict[str, Any]:
    """Runs the parts, and writes and returns what came out.

    Raises:
      ValueError: an unknown part or head, too few seeds, no candidates, or updates that the steps of progress do not
        divide.
    """
    parts = studies.names("parts", settings.parts, PARTS)
    names = studies.names("heads", settings.heads, heads.NAMES)
    for flag in ("seeds", "chunk_seeds"):
        studies.check_seeds(getattr(settings, flag), flag)
    for flag in ("updates", "chunk_updates"):
        if getattr(settings, flag) % PIECES:
            raise ValueError(f"--{flag}={getattr(settings, flag)} must be a multiple of {PIECES}")
    if 1 not in settings.candidates or min(settings.candidates) < 1:
        candidates = ",".join(map(str, settings.candidates))
        raise ValueError(
            f"--candidates={candidates} must be positive, with 1 among them: the flow without a choice"
        )
    variants = bandit(settings, names) if "bandit" in parts else {}
    variants |= proposals_chunks.variants(settings, parts, names)
    finished = studies.train(settings, variants, "proposals")
    outcomes: dict[str, Any] = {"wall_seconds": finished.seconds}
    if "bandit" in parts:
        outcomes["bandit"] = {GAUSSIAN: finished.outcomes["bandit, cloning"]}
        for kind in (FLOW, DISTILLED):
            outcomes["bandit"][kind] = {head: finished.outcomes[f"bandit, {kind}, {head}"] for head in names}
    result = studies.finish(
        settings, outcomes | proposals_chunks.results(finished.outcomes), report, claims, trained=finished
    )
    draw(Path(settings.out), result)
    return result


def bandit(settings: Settings, names: list[str]) -> dict[str, studies.Variant]:
    """What is trained on the bandit."""
    work: dict[str, Callable[..., Any]] = {"bandit, cloning": functools.partial(of_cloning, settings)}
    for head in names:
        work[f"bandit, {FLOW}, {head}"] = functools.partial(of_flow, settings, head)
        work[f"bandit, {DISTILLED}, {head}"] = functools.partial(of_distilled, settings, head)
    depends = studies.chosen(settings, "heads", "chunk_seeds", "chunk_updates")
    return {
        name: studies.Variant(function, depends, settings.seeds * PIECES) for name, function in work.items()
    }


# ---- the bandit ----------------------------------------------------------------------------------------------------


def reward(action: Array) -> Array:
    """What an action [..., 2] pays on average, [...]: that of the mode that it is nearest to, less with distance.

    The fourth power is flat within a mode and steep between modes. With a Gaussian of deviation 0.25 the rim of the
    best mode paid less than the centre of the next one, so that the best of N was rightly not of the best mode.
    """
    return (jnp.asarray(WORTH) * jnp.exp(-0.5 * (distances(action) / REACH) ** 4)).max(-1)


def distances(action: Array) -> Array:
    """To each mode, [..., 4]."""
    return jnp.linalg.norm(action[..., None, :] - MODES, axis=-1)


def batch(settings: Settings, key: Key) -> Transition:
    """Logged steps, each an episode of its own."""
    keys, count = jax.random.split(key, 3), settings.batch_size
    mode = jax.random.choice(keys[0], len(MODES), (count,), p=jnp.asarray(SHARES))
    action = jnp.asarray(MODES)[mode] + DEVIATION * jax.random.normal(keys[1], (count, 2))
    paid = reward(action) + NOISE * jax.random.normal(keys[2], (count,))
    state, none = jnp.zeros((count, 1)), jnp.zeros(count)
    return Transition(state, action, paid, none, state, action, none)


def value_head(settings: Settings, name: str) -> heads.ValueHead:
    return heads.make(name, -5.0, 15.0, settings.atoms)


def trained(
    settings: Settings, purpose: str, learner: Learner, work: studies.Work
) -> Iterator[tuple[State, Key]]:
    """The agent of each seed, one after another, and a key to judge it with."""
    sample = lambda _, key, step: batch(settings, key)
    epoch = jax.jit(train.scan_updates(learner.update, sample, settings.updates // PIECES), donate_argnums=0)
    root = jax.random.fold_in(jax.random.key(settings.seed), np.uint32(zlib.crc32(purpose.encode())))
    init = jax.jit(learner.init)
    for seed in range(settings.seeds):
        init_key, update_key, judge_key = jax.random.split(jax.random.fold_in(root, seed), 3)
        state = init(init_key, batch(settings, init_key))
        for _ in range(PIECES):
            state, epoch_report = epoch(state, None, update_key)
            train.check_finite(epoch_report)
            work.progress(1)
        yield state, judge_key


def describe(action: Array) -> dict[str, Array]:
    """Of draws [n, 2]: the share of each mode, of all modes together, and the mean reward."""
    near = distances(action) < NEAR
    return {"modes": near.mean(0), "near": near.any(-1).mean(), "reward": reward(action).mean()}


def judge(
    settings: Settings, act: Callable[[State, Array, Key], Array]
) -> Callable[[State, Key], dict[str, Array]]:
    """`describe` of as many draws as the settings say, compiled: a function of the agent's state and a key."""
    return jax.jit(lambda state, key: describe(act(state, jnp.zeros((settings.draws, 1)), key)))


def shared(settings: Settings, *networks: str) -> dict[str, Any]:
    """Hyper-parameters of every agent; the learning rate of these networks falls, so that their shares settle."""
    falling = Adam("cosine", settings.updates)
    settled = {f"{name}_optimiser": falling for name in networks}
    return {"learning_rate": settings.learning_rate, "hidden": settings.hidden, **settled}


def flows(settings: Settings) -> dict[str, Any]:
    """How draws of a flow are found."""
    return {"flow_steps": settings.flow_steps, "integrator": settings.integrator}


def of_cloning(settings: Settings, work: studies.Work) -> dict[str, Any]:
    """A Gaussian policy's draws, and how far its mean is from the nearest mode; [S] each."""
    config = bc.Config(**shared(settings, "policy"))
    learner, policy = (
        bc.make(config, SPEC, heads.scalar()),
        mlp.behaviour_policy(SPEC, settings.hidden, config.network),
    )

    def sample(state: State, observation: Array, key: Key) -> Array:
        return policy.apply(state.params["policy"], observation).sample(seed=key)

    rows, judged = [], judge(settings, sample)
    for state, key in trained(settings, "cloning", learner, work):
        mean = learner.act(state, jnp.zeros(1), key)
        rows.append(
            {
                **judged(state, key),
                "distance": float(distances(mean).min()),
                "mean_reward": float(reward(mean)),
            }
        )
    return studies.stacked(rows)


def of_flow(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """The draws of IFQL's policy that its critics choose from N, for each N; [S] each."""
    config = ifql.Config(**shared(settings, "flow"), **flows(settings))
    learners = {
        str(count): ifql.make(dataclasses.replace(config, candidates=count), SPEC, value_head(settings, name))
        for count in settings.candidates
    }
    judged = {count: judge(settings, learner.act) for count, learner in learners.items()}
    states = trained(settings, f"flow, {name}", learners["1"], work)  # N is of acting alone
    return studies.stacked([{count: of(state, key) for count, of in judged.items()} for state, key in states])


def of_distilled(settings: Settings, name: str, work: studies.Work) -> dict[str, Any]:
    """The draws of FQL's policy, [S] each."""
    config = fql.Config(
        **shared(settings, "flow", "policy"),
        **flows(settings),
        alpha=settings.alpha,
        normalize_q=True,
    )
    learner = fql.make(config, SPEC, value_head(settings, name))
    judged = judge(settings, learner.act)
    states = trained(settings, f"distilled, {name}", learner, work)
    return studies.stacked([judged(state, key) for state, key in states])


# ---- what may be said ----------------------------------------------------------------------------------------------


def expected(share: Any, candidates: int) -> Any:
    """How often a mode with this share of all draws is among several."""
    return 1 - (1 - share) ** candidates


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the constructions predict, of the parts that were run."""
    if "bandit" in result:
        yield from bandit_claims(result)
    yield from proposals_chunks.claims(result)


def bandit_claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the bandit's construction predicts."""
    policies, every = result["bandit"], studies.every
    gaussian = policies[GAUSSIAN]
    text = f"Gaussian cloning: the mean is between modes (distance to the nearest, beyond {NEAR})"
    yield studies.Claim(text, OURS, gaussian["distance"] - NEAR, every(lambda x: x > 0))
    for head, flow in policies[FLOW].items():
        alone = flow["1"]
        text = f"{head}: more of the flow's draws than of the Gaussian's are of a mode (difference)"
        yield studies.Claim(text, OURS, alone["near"] - gaussian["near"], studies.positive)
        text = f"{head}: the flow covers all four modes (the least share, in that of the data)"
        yield studies.Claim(text, OURS, (alone["modes"] / SHARES).min(1), every(lambda x: x > 0.5))
        for count in result["settings"]["candidates"]:
            share, close = flow[str(count)]["modes"][:, BEST], studies.mean_within(-0.03, 0.03)
            text = f"{head}: the best of {count} is of the best mode as often as the data say, to 0.03 (difference)"
            data = expected(SHARES[BEST], count)
            yield studies.Claim(text, f"1 - 0.9^{count} = {data:.3f}", share - data, close)
            if count > 1:
                text = f"{head}: the best of {count} is of it as often as the flow's own share of it says (difference)"
                predicted = expected(alone["modes"][:, BEST], count)
                yield studies.Claim(text, f"1 - (1 - p)^{count}", share - predicted, close)
        text = f"{head}: the distilled policy earns more than the flow (difference)"
        ahead = policies[DISTILLED][head]["reward"] - alone["reward"]
        yield studies.Claim(text, "FQL (Park et al., ICML 2025), in words", ahead, studies.positive)


def rows_of(policies: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every policy with its name."""
    yield GAUSSIAN, policies[GAUSSIAN]
    for head, flow in policies[FLOW].items():
        for count, row in flow.items():
            yield (f"{head}: a draw of the flow" if count == "1" else f"{head}: the best of {count}"), row
        yield f"{head}: distilled", policies[DISTILLED][head]


def share_between(shares: np.ndarray) -> str:
    """A mean share and Student's interval, cut at 0 and 1.

    Each share [S] is of thousands of draws. Wilson's interval is for scores of a few episodes: it would be the wider,
    the better the seeds agree on 1.
    """
    summary = statistics.summary(shares)
    low, high = np.clip(summary["ci95"], 0, 1)
    return studies.between({"mean": summary["mean"], "ci95": [low, high]})


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    yield "# Policies that propose, and critics that choose"
    yield (
        f"`{result['command']}`, {result['wall_seconds'] / 60:.0f} minutes on {result['hardware']['cores']} cores. "
        f"{studies.program(result, __file__)} says what is compared. Mean and 95 % interval over "
        "seeds."
    )
    if "bandit" in result:
        yield from bandit_report(result)
    yield from proposals_chunks.report(result)


def bandit_report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks on the bandit."""
    settings, policies = result["settings"], result["bandit"]
    yield "## Four modes"
    yield (
        f"{settings['seeds']} seeds, {settings['updates']:,} updates of {settings['batch_size']} rows, layers of "
        f"{' and '.join(map(str, settings['hidden']))}."
    )
    logged = ", ".join(f"{share:.0%}" for share in SHARES)
    yield (
        f"The modes have {logged} of the data and pay {', '.join(f'{x:g}' for x in WORTH)}; the first one is the best. "
        f"*Of a mode* is an action within {NEAR} of it. The Gaussian's mean is "
        f"{studies.between(policies[GAUSSIAN]['distance'])} from the nearest mode and pays "
        f"{studies.between(policies[GAUSSIAN]['mean_reward'])}; the row below is of its draws."
    )
    yield studies.table(
        ("", "of the best mode", "of the others", "of any mode", "reward"),
        [
            (
                name,
                share_between(row["modes"][:, BEST]),
                " / ".join(f"{x:.2f}" for x in row["modes"].mean(0)[1:]),
                share_between(row["near"]),
                studies.between(row["reward"]),
            )
            for name, row in rows_of(policies)
        ],
    )
    yield "![share of the best mode](best_of.png)"


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """The share of the best mode against N, beside what it should be; nothing without the bandit."""
    if "bandit" not in result:
        return
    counts = result["settings"]["candidates"]
    curves = {
        head: (counts, *studies.bands([flow[str(n)]["modes"][:, BEST] for n in counts]).clip(0, 1))
        for head, flow in result["bandit"][FLOW].items()
    }
    exact = [expected(SHARES[BEST], n) for n in counts]
    curves["1 - 0.9^N"] = (counts, exact, exact, exact)
    plot.lines(
        folder / "best_of.png", curves, "N", "share of the best mode", title="The best of N draws", rate=True
    )


if __name__ == "__main__":
    studies.main(Settings(), run)
