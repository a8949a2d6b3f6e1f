"""Do values rank programs better than simpler things do? B-Coder on programs that an imperfect writer taught a model.

    python -m experiments.papers.bcoder_dsl
    python -m experiments.papers.bcoder_dsl --tasks=ablations --out=results/papers/bcoder_dsl/ablations

The problems are those of `rl.programs.dsl`: a description in a few words, a program in one line, five unit tests that
are really run. A small language model is trained on programs of a writer who confuses some things with others, always
the same ones, so that it is often wrong where it is most certain. It then writes programs for problems to learn from,
these are judged, and every learner starts from the model and gets the same programs:

- B-Coder with the ground truth, or without any: anchored on the programs that passed. Its ablations: the operator (max,
  sarsa), TD alone, the paper's alpha, the HL-Gauss head.
- The controls, without values: fine-tuning on the ground truth (SFT) and on the programs that passed (RFT, rejection
  fine-tuning), for as many updates as B-Coder's policy; the model itself, and sharpened.

Half of every batch is what is imitated (where there is such a thing), half are programs of the model; for all alike.
Learners rank programs for held-out problems, whoever wrote them: B-Coder by the rewards that its values imply, the
others by log-probability. Programs are the model's *own*, or those of *another* writer, with other mistakes.

*easy* is one map and one filter (280 problems, 56 of them held out): a check that the implementation is right. A
prototype had shown that the controls do as well there, which is why *hard* exists: two of each, held-out compositions,
and fewer than one program in twenty right, so that the graded rewards of programs that fail say something that
fine-tuning throws away. *ablations* is hard again, with one thing changed at a time: the operator, no value stage, no
language model to start from, and TD alone, with and without a model to start from; B-Coder is trained again beside
them, so that all of a seed learn from the same programs and rank the same ones. Figure 1 of the paper is such a ladder,
on APPS's training problems: the values of a dueling DQN become worse, a language model to start from helps, and the
conservative operator helps further.

Published are the algorithm and its ablations (Yu et al., ICLR 2024), on APPS; the tasks, the sizes and the controls are
ours. alpha = 0.1 and the numbers of updates come from a prototype on easy that looked at seeds 0 to 2; the sizes, and
how imperfect the writers of hard are, from a look at seed 0. The defaults leave these seeds out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import studies
from rl import plot, statistics, train
from rl.agents import bcoder, lm_bc
from rl.language import generate, model, ranking
from rl.language.model import LM
from rl.networks.transformer import Shape
from rl.programs import dsl
from rl.programs.pool import REWARDS, Pool, Verdict
from rl.programs.problems import Problem
from rl.replay import source
from rl.replay import tokens as replay
from rl.replay.source import Source
from rl.replay.tokens import Turn
from rl.types import Array, Key, Params, State, TokenBatch
from rl.values import heads
from rl.values.tokens import per_episode

PUBLISHED = studies.published("bcoder")
END, START = 0, 1  # after a program; between a description and a program
WORDS = ("<end>", "<program>", *dsl.VOCABULARY)
SHARPER = 4.0
LESSONS = 8192  # programs of the writer that the model is trained on
CLASSES = {  # from best to worst
    "pass": (Verdict.PASSED,),
    "fail": (Verdict.FAILED,),
    "runtime error": (Verdict.RUNTIME_ERROR, Verdict.TIMEOUT),
    "compile error": (Verdict.COMPILE_ERROR,),
}


class Task(NamedTuple):
    """Problems, and who writes programs for them."""

    depth: int  # maps and filters of a problem
    writer: dsl.Noise  # whom the model learns from
    other: dsl.Noise  # whose programs are ranked too
    learnt: int  # problems to learn from
    held_out: int
    candidates: int  # programs to be ranked, per held-out problem and writer


class Variant(NamedTuple):
    """A learner. Without an operator it is cloning; what imitates nothing learns from TD alone."""

    imitates: str  # truth, passed, or nothing
    operator: str = "conservative"
    alpha: float = 0.1
    head: str = "scalar"
    value_stage: bool = True
    # Otherwise what learns starts with random weights. The frozen model that a conservative operator asks never does.
    pretrained: bool = True


_HARD = Task(
    2,
    dsl.Noise(misreading=0.4),
    # The other writer confuses nothing, and slips and misreads more.
    dsl.Noise(confusion=0.0, slips=0.4, misreading=0.55),
    256,
    64,
    32,
)
TASKS = {
    "easy": Task(1, dsl.USUAL, dsl.Noise(confusion=0.0, misreading=0.3), 224, 56, 16),
    "hard": _HARD,
    "ablations": _HARD,
}
BCODER, CODER_OF_PASSES = "B-Coder, ground truth", "B-Coder, passing programs"
MODEL, SHARPENED, RFT, SFT = "the model itself", "the model, sharpened", "RFT", "SFT on ground truth"
MAIN = {
    BCODER: Variant("truth"),
    CODER_OF_PASSES: Variant("passed"),
    "B-Coder, passing, HL-Gauss": Variant("passed", head="hl_gauss"),
    RFT: Variant("passed", ""),
    SFT: Variant("truth", ""),
}
ABLATIONS = {
    "B-Coder, passing, sarsa": Variant("passed", "sarsa"),
    "B-Coder, passing, max": Variant("passed", "max"),
    "B-Coder, ground truth, alpha 1": Variant("truth", alpha=1.0),
    "TD only, conservative": Variant("nothing"),
    "TD only, max": Variant("nothing", "max"),
}
FROM_RANDOM, NO_VALUE_STAGE = "B-Coder, passing, random weights", "B-Coder, passing, no value stage"
PASSING_SARSA, PASSING_MAX = "B-Coder, passing, sarsa", "B-Coder, passing, max"
TD, TD_MAX, DUELING_DQN = "TD only, conservative", "TD only, max", "TD only, max, random weights"
LADDER = {  # one thing changed, with the anchor and without
    CODER_OF_PASSES: MAIN[CODER_OF_PASSES],
    PASSING_MAX: ABLATIONS[PASSING_MAX],
    PASSING_SARSA: ABLATIONS[PASSING_SARSA],
    NO_VALUE_STAGE: Variant("passed", value_stage=False),
    FROM_RANDOM: Variant("passed", pretrained=False),
    TD: ABLATIONS[TD],
    TD_MAX: ABLATIONS[TD_MAX],
    DUELING_DQN: Variant("nothing", "max", pretrained=False),
}
VARIANTS = {"easy": MAIN | ABLATIONS, "hard": MAIN, "ablations": LADDER}
CONTROLS = (MODEL, SHARPENED, RFT, SFT)


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    seeds: int = 5  # splits, each with its own model, programs and learners
    seed: int = 3  # the first of them; settings were chosen on 0 to 2
    tasks: str = "easy,hard"  # which to run
    pretraining: int = 3000  # updates of the language model
    samples: int = 16  # programs for each problem to learn from
    value_updates: int = 500  # of B-Coder's value stage
    updates: int = 500  # of its policy stage, and of the controls
    batch_size: int = 32  # programs per update
    learning_rate: float = 3e-4  # of everything
    width: int = 64  # of the transformer's two layers
    out: str = "results/papers/bcoder_dsl"


class Candidates(NamedTuple):
    """``m`` programs for each of ``P`` held-out problems."""

    rows: TokenBatch  # [P * m, T]
    verdicts: np.ndarray  # [P, m] of `Verdict`

    @property
    def passed(self) -> np.ndarray:
        return self.verdicts == Verdict.PASSED


class Learnt(NamedTuple):
    """What a variant's training and judging compile to."""

    learn: Callable[[Params, Any, Key], State]  # from the model's parameters, with what `halves` samples
    score: Callable[[State, TokenBatch], Array]  # of programs, [N]


class Workshop(NamedTuple):
    """Everything that is compiled for one task."""

    length: int  # of a row
    pretrain: Callable[[TokenBatch, Key], Params]
    write: dict[str, Callable[[Params, np.ndarray, Key], list[str]]]  # greedily, and at temperature 1
    models: dict[str, Callable[[Params, TokenBatch], Array]]  # scores of programs [N] by the model
    variants: dict[str, Learnt]


# ---- the study ----------------------------------------------------------------------------------------------------


def run(settings: Settings) -> dict[str, Any]:
    """Writes, judges, learns and ranks; returns what result.json holds.

    Raises:
      ValueError: an unknown task, too few seeds for an interval, or a model none of whose programs passes.
      IsolationError: nothing here can isolate the programs.
    """
    names = studies.names("tasks", settings.tasks, TASKS)
    studies.check_seeds(settings.seeds)
    if settings.batch_size < 2 or settings.batch_size % 2:
        raise ValueError(f"--batch_size={settings.batch_size} must be even: half of it are anchors")
    seeds = range(settings.seed, settings.seed + settings.seeds)
    with Pool() as pool:
        variants = {
            f"{name}, seed {seed}": studies.Variant(
                functools.partial(one_seed, settings, name, pool, seed),
                {
                    **studies.chosen(settings, "tasks", "seeds", "seed"),
                    "task": TASKS[name],
                    "of": VARIANTS[name],
                },
                3 + len(VARIANTS[name]),
            )
            for name in names
            for seed in seeds
        }
        trained = studies.train(settings, variants, "dsl")
        isolation = pool.isolation
    workshop.cache_clear()
    outcomes = {
        name: studies.stacked([trained.outcomes[f"{name}, seed {seed}"] for seed in seeds]) for name in names
    }
    rows = {
        "isolation": isolation,
        "wall_seconds": trained.seconds,
        "tasks": outcomes,
        "differences": {name: differences(outcome["ranked"]) for name, outcome in outcomes.items()},
    }
    result = studies.finish(settings, rows, report, claims, trained=trained)
    draw(Path(settings.out), outcomes)
    return result


def one_seed(settings: Settings, name: str, pool: Pool, seed: int, work: studies.Work) -> dict[str, Any]:
    """All learners on one split, which share its model and its programs."""
    task, shop = TASKS[name], workshop(settings, name)
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), 5)
    everything, held_out = dsl.split(dsl.compositions(task.depth), rng)

    lessons = [everything[i] for i in rng.integers(len(everything), size=LESSONS)]
    written = [dsl.write(one, rng, task.writer) for one in lessons]
    params = shop.pretrain(rows([dsl.problem(one, rng) for one in lessons], written, shop.length), keys[0])
    work.progress(1)

    problems = [dsl.problem(one, rng) for one in everything[: task.learnt]]
    repeated = [problem for problem in problems for _ in range(settings.samples)]
    programs = shop.write["sampled"](params, prompts(repeated), keys[1])
    verdicts = judge(pool, repeated, programs)
    samples = rows(repeated, programs, shop.length, verdicts, imitate=0.0)
    truth = [expression(problem) for problem in problems]
    right = np.full(len(problems), Verdict.PASSED)
    anchors = {
        "truth": (rows(problems, truth, shop.length, right), len(problems)),
        "passed": passing(rows(repeated, programs, shop.length, verdicts), verdicts),
        "nothing": (samples, len(repeated)),
    }
    work.progress(1)

    held_out = held_out[: task.held_out]
    problems = [dsl.problem(one, rng) for one in held_out]
    repeated = [problem for problem in problems for _ in range(task.candidates)]
    theirs = [dsl.write(one, rng, task.other) for one in held_out for _ in range(task.candidates)]
    candidates = {}
    for who, programs in {
        "own": shop.write["sampled"](params, prompts(repeated), keys[2]),
        "another": theirs,
    }.items():
        judged = judge(pool, repeated, programs)
        candidates[who] = Candidates(
            rows(repeated, programs, shop.length, judged), judged.reshape(-1, task.candidates)
        )
    work.progress(1)

    ranked: dict[str, dict[str, float]] = {
        who: {
            "random": ranking.pass_at_k(those.passed, 1),
            "oracle": float(those.passed.any(1).mean()),
        }
        for who, those in candidates.items()
    }
    means: dict[str, dict[str, dict[str, float]]] = {who: {} for who in candidates}
    policies = {MODEL: solved(shop, pool, params, problems, keys[3])}

    def rank(name: str, score: Callable[[TokenBatch], Array]) -> None:
        for who, those in candidates.items():
            scores = np.asarray(score(those.rows)).reshape(those.verdicts.shape)
            ranked[who][name] = ranking.ranked_pass_at_k(those.passed, scores, 1)
            means[who][name] = class_means(scores, those.verdicts)

    for variant, judges in shop.models.items():
        rank(variant, functools.partial(judges, params))
    for variant, learner in shop.variants.items():
        anchor = anchors[VARIANTS[name][variant].imitates]
        state = learner.learn(params, (anchor, samples), keys[4])
        rank(variant, functools.partial(learner.score, state))
        policies[variant] = solved(shop, pool, state.params["policy"], problems, keys[3])
        work.progress(1)
    kinds = {kind: int(np.isin(verdicts, of).sum()) for kind, of in CLASSES.items()}
    return {"learnt_from": kinds, "ranked": ranked, "class_means": means, "policies": policies}


def solved(
    shop: Workshop, pool: Pool, params: Params, problems: Sequence[Problem], key: Key
) -> dict[str, float]:
    """The share of problems that the policy's own program solves: its likeliest, or one at temperature 1."""
    return {
        how: float((judge(pool, problems, write(params, prompts(problems), key)) == Verdict.PASSED).mean())
        for how, write in shop.write.items()
    }


def class_means(scores: np.ndarray, verdicts: np.ndarray) -> dict[str, float]:
    """The mean score of programs of each kind; NaN where there is none."""
    chosen = {kind: scores[np.isin(verdicts, of)] for kind, of in CLASSES.items()}
    return {kind: float(subset.mean()) if len(subset) else float("nan") for kind, subset in chosen.items()}


# ---- programs as tokens -------------------------------------------------------------------------------------------


def judge(pool: Pool, problems: Sequence[Problem], expressions: Sequence[str]) -> np.ndarray:
    """The verdicts on programs for problems, [N]."""
    pairs = zip(problems, map(dsl.program, expressions), strict=True)
    return np.array(pool.run(pairs))


def expression(problem: Problem) -> str:
    """What the ground truth returns."""
    return problem.reference.removeprefix(dsl.program(""))


def prompts(problems: Sequence[Problem]) -> np.ndarray:
    """Descriptions as tokens, [N, T]; all of a task are equally long."""
    return np.array([[*encode(problem.prompt), START] for problem in problems], np.int32)


def encode(text: str) -> list[int]:
    """The tokens of a text, which has spaces between them."""
    return [WORDS.index(word) for word in text.split()]


def rows(
    problems: Sequence[Problem],
    expressions: Sequence[str],
    length: int,
    verdicts: np.ndarray | None = None,
    imitate: float = 1.0,
) -> TokenBatch:
    """Descriptions and programs, one of each in a row of ``length`` tokens; without verdicts, no rewards.

    A program that was cut off is ended: it was judged as it stood.
    """
    rewards = [0.0] * len(problems) if verdicts is None else [REWARDS[Verdict(v)] for v in verdicts]
    episodes = [
        replay.episode([Turn(prompt), Turn([*encode(text), END], True, reward)], True, imitate)
        for prompt, text, reward in zip(prompts(problems), expressions, rewards, strict=True)
    ]
    return jax.device_put(replay.pack(episodes, length, together=False, bounds=(-1, 1)))


def passing(data: TokenBatch, verdicts: np.ndarray) -> tuple[TokenBatch, int]:
    """The rows with those that passed first, and their number; all rows stay, so that shapes do not change.

    Raises:
      ValueError: none passed.
    """
    passed = verdicts == Verdict.PASSED
    if not passed.any():
        raise ValueError(f"none of {len(passed)} programs passed: raise --samples or --pretraining")
    return replay.take(data, np.argsort(~passed, kind="stable")), int(passed.sum())


def halves(batch_size: int) -> Source:
    """Of ((anchors, count), programs): half a batch of the first ``count`` anchors, then half of the programs."""
    half = batch_size // 2

    def anchored(data: tuple[TokenBatch, Array], key: Key, step: Array | int) -> TokenBatch:
        del step
        anchors, count = data
        return replay.take(anchors, jax.random.randint(key, (half,), 0, count))

    return source.concatenated(anchored, replay.sampler(half))


# ---- learners -----------------------------------------------------------------------------------------------------


@functools.cache
def workshop(settings: Settings, name: str) -> Workshop:
    """The model of a task and all that is done with it, compiled when first used and then for every seed."""
    task, variants = TASKS[name], VARIANTS[name]
    longest = max(len(expression(_problem(one)).split()) for one in dsl.compositions(task.depth))
    prompt, steps = 2 * task.depth + 2, longest + 1  # a slip may double a token
    length = prompt + steps + 1
    size = settings.width // 2
    shape = Shape(settings.width, layers=2, heads=2, kv_heads=2, head_size=size, inner=2 * settings.width)
    lm = model.make(model.Config(len(WORDS), length, shape))

    def writer(temperature: float) -> Callable[[Params, np.ndarray, Key], list[str]]:
        sample = generate.generator(generate.decoder(lm), steps, temperature=temperature, stop=[END])

        def write(params: Params, prompts: np.ndarray, key: Key) -> list[str]:
            sampled = sample(params, prompts, np.ones_like(prompts), key)
            texts = zip(np.asarray(sampled.tokens), np.asarray(sampled.length), strict=True)
            return [" ".join(WORDS[t] for t in text[:end] if t != END) for text, end in texts]

        return write

    cloning = lm_bc.make(lm_bc.Config(settings.learning_rate), lm, heads.scalar())
    epoch = train.scan_updates(cloning.update, replay.sampler(settings.batch_size), settings.pretraining)
    return Workshop(
        length,
        jax.jit(lambda data, key: epoch(cloning.init(key, data), data, key)[0].params["policy"]),
        {"greedy": writer(0.0), "sampled": writer(1.0)},
        {MODEL: _log_prob(lm), SHARPENED: _log_prob(sharpened(lm))},
        {name: _learnt(settings, lm, variant) for name, variant in variants.items()},
    )


def sharpened(lm: LM) -> LM:
    """The model at a temperature of 1 / `SHARPER`."""
    return lm._replace(logits=lambda params, features: SHARPER * lm.logits(params, features))


def _learnt(settings: Settings, lm: LM, variant: Variant) -> Learnt:
    head = heads.make(variant.head, -1.0, 1.0, 51)
    cloning = not variant.operator
    anchored = variant.imitates != "nothing"
    config = bcoder.Config(
        alpha=variant.alpha,
        operator=variant.operator or "conservative",
        value_updates=settings.value_updates if variant.value_stage else 0,
        advantage_weight=0.1 if anchored else 0.0,
        imitation_weight=0.5 if anchored else 0.0,
        value_learning_rate=settings.learning_rate,
        learning_rate=settings.learning_rate,
        inner=2 * settings.width,
    )

    @jax.jit
    def learn(params: Params, data: Any, key: Key) -> State:
        start = model.pretrained(lm, params) if variant.pretrained else lm
        if cloning:
            learner = lm_bc.make(lm_bc.Config(settings.learning_rate, config.weight_decay), start, head)
        else:
            learner = bcoder.make(config, start, head)
        updates = settings.updates + (0 if cloning else config.value_updates)
        epoch = train.scan_updates(learner.update, halves(settings.batch_size), updates)
        state = learner.init(key, data[0][0])
        if not variant.pretrained and variant.operator == "conservative":
            state = state._replace(target={**state.target, "policy": params})
        return epoch(state, data, key)[0]

    if cloning:
        likelihood = _log_prob(lm)
        return Learnt(learn, lambda state, data: likelihood(state.params["policy"], data))
    judges = bcoder.token_values(config, lm, head)
    score = lambda state, data: per_episode(judges(state, data).score, data.segment, 1)[:, 0]
    return Learnt(learn, jax.jit(score))


def _log_prob(lm: LM) -> Callable[[Params, TokenBatch], Array]:
    """The log-probability of each program, its end included, [N]."""

    @jax.jit
    def score(params: Params, data: TokenBatch) -> Array:
        each = model.log_probabilities(lm, params, data.tokens, data.segment)
        return per_episode(jnp.where(data.is_action, each, 0.0), data.segment, 1)[:, 0]

    return score


def _problem(composition: dsl.Composition) -> Problem:
    return dsl.problem(composition, np.random.default_rng(0))


# ---- what came out ------------------------------------------------------------------------------------------------


def differences(ranked: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """{whose programs: {learner: {control: pass@1 of the one minus that of the other, within seeds}}}."""
    return {
        who: {
            name: {
                control: statistics.summary(rates[name] - rates[control])
                for control in CONTROLS
                if control in rates
            }
            for name in rates
            if name.startswith(("B-Coder", "TD"))
        }
        for who, rates in ranked.items()
    }


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What a right implementation does on easy, in every seed; and what values are claimed to do, on hard."""
    ours, published = "ours: a check", "B-Coder (Yu et al., ICLR 2024), on APPS: values rank programs"
    if outcome := result["tasks"].get("easy"):
        ranked, policies = outcome["ranked"]["own"], outcome["policies"]
        means = np.array([outcome["class_means"]["own"][BCODER][kind] for kind in CLASSES])
        yield studies.Claim(
            "easy: B-Coder's pass@1 is above random's by 0.3, in every seed (by how much)",
            ours,
            ranked[BCODER] - ranked["random"],
            studies.every(lambda x: x >= 0.3),
        )
        yield studies.Claim(
            "easy: mean scores are ordered pass > fail > runtime error > compile error, in every seed (least step)",
            ours,
            -np.diff(means, axis=0).max(0),
            studies.every(lambda x: x > 0),
        )
        yield studies.Claim(
            "easy: B-Coder's likeliest program solves 0.2 more than the model's, on average (by how much)",
            ours,
            policies[BCODER]["greedy"] - policies[MODEL]["greedy"],
            studies.mean_within(low=0.2),
        )
    if outcome := result["tasks"].get("hard"):
        for who, ranked in outcome["ranked"].items():
            text = f"hard, {who} programs: fewer than 5 % pass"
            yield studies.Claim(text, ours, ranked["random"], studies.mean_within(high=0.05))
            text = f"hard, {who} programs: {CODER_OF_PASSES}, ranks better than random (pass@1)"
            gains = [f"{row['gain']:+.2f}" for row in PUBLISHED["apps"] if row["k"] == 1]
            source = f"{' and '.join(gains)} points on APPS (table 3): B-Coder (Yu et al., ICLR 2024)"
            yield studies.Claim(text, source, ranked[CODER_OF_PASSES] - ranked["random"], studies.positive)
        for who, by in differences(outcome["ranked"]).items():
            for control, difference in by[CODER_OF_PASSES].items():
                text = f"hard, {who} programs: {CODER_OF_PASSES}, ranks better than {control} (pass@1)"
                yield studies.Claim(text, published, difference["each"], studies.positive)
        theirs = next(row for row in PUBLISHED["unranked"] if row["k"] == 1)
        source = (
            f"ours; on APPS, without ranking, the paper's policy solves {theirs['bcoder']:.2f} %, and the model that "
            f"it starts from {theirs['coderl']:.2f} % (table 8)"
        )
        policies = outcome["policies"]
        for control in (RFT, SFT):
            text = f"hard: one sample of {CODER_OF_PASSES}, solves more than one of {control} (difference)"
            gain = policies[CODER_OF_PASSES]["sampled"] - policies[control]["sampled"]
            yield studies.Claim(text, source, gain, studies.positive)
    if outcome := result["tasks"].get("ablations"):
        yield from _ladder_claims(outcome)


def _ladder_claims(outcome: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper's figure 1 says helps, by pass@1 within seeds; with the anchor and without."""
    figure = "B-Coder (Yu et al., ICLR 2024), figure 1, on APPS's training problems: "
    model_helps, operator_helps = (
        figure + "a language model to start from helps",
        figure + "the conservative operator helps further",
    )
    for who, ranked in outcome["ranked"].items():
        for better, worse, said in (
            (TD_MAX, DUELING_DQN, model_helps),
            (TD, TD_MAX, operator_helps),
            (CODER_OF_PASSES, FROM_RANDOM, model_helps),
            (CODER_OF_PASSES, PASSING_MAX, operator_helps),
            (CODER_OF_PASSES, PASSING_SARSA, studies.OURS),
            (CODER_OF_PASSES, NO_VALUE_STAGE, studies.OURS),
        ):
            text = f"ablations, {who} programs: {better}, ranks better than {worse} (pass@1)"
            yield studies.Claim(text, said, ranked[better] - ranked[worse], studies.positive)


def draw(folder: Path, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Pass@1 of every ranking, one figure per task and writer."""
    for name, outcome in outcomes.items():
        for who, ranked in outcome["ranked"].items():
            plot.bars(
                folder / f"{name}_{who}.png",
                {ranker: studies.band(scores, rate=True) for ranker, scores in ranked.items()},
                "pass@1 on held-out problems (95 % interval)",
                title=f"{name}: {'the model' if who == 'own' else 'another writer'}'s programs",
                rate=True,
            )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = result["settings"]
    last = settings["seed"] + settings["seeds"] - 1
    yield "# B-Coder on small programs"
    yield (
        f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores; seeds "
        f"{settings['seed']} to {last}, means and 95 % intervals: of differences Student's, of rates within 0 and 1. "
        f"{studies.program(result, __file__)} says what is compared."
    )
    rate = functools.partial(studies.between, style=".3f", rate=True)
    for name, outcome in result["tasks"].items():
        task, counts = TASKS[name], outcome["learnt_from"]
        yield f"## {name.capitalize()}"
        total = sum(count.mean() for count in counts.values())
        yield (
            f"Learned from {task.learnt} problems and {total:.0f} programs of the model: "
            + ", ".join(f"{count.mean():.0f} {kind}" for kind, count in counts.items())
            + f" (means over seeds). Ranked: {task.candidates} programs for each of {task.held_out} held-out problems."
        )
        rows = []
        for ranker in outcome["ranked"]["own"]:
            solves = outcome["policies"].get(ranker, {})
            ranked = [rate(outcome["ranked"][who][ranker]) for who in ("own", "another")]
            rows.append(
                (ranker, *ranked, *(rate(solves[how]) if solves else "" for how in ("greedy", "sampled")))
            )
        head = (
            "pass@1 ranking the model's programs",
            "another's",
            "likeliest program solves",
            "one sample solves",
        )
        yield studies.table(("", *head), rows)
        yield "Mean score of the model's programs for held-out problems:"
        means = outcome["class_means"]["own"].items()
        yield studies.table(
            ("", *CLASSES),
            [(ranker, *(f"{np.nanmean(by[kind]):.2f}" for kind in CLASSES)) for ranker, by in means],
        )
        yield "Pass@1 minus a control's, within seeds; bold where the interval leaves out 0:"
        over = functools.partial(studies.difference, style=".3f")
        controls = [control for control in CONTROLS if control in outcome["ranked"]["own"]]
        yield studies.table(
            ("programs of", "learner", *controls),
            [
                ("the model" if who == "own" else "another", ranker, *(over(by[c]) for c in controls))
                for who, differences in result["differences"][name].items()
                for ranker, by in differences.items()
            ],
        )


if __name__ == "__main__":
    studies.main(Settings(), run)
