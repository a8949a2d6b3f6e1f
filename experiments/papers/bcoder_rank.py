"""Ranking real programs by token-level values, on problems that no value was trained on (B-Coder, ICLR 2024).

    python -m experiments.papers.bcoder_rank

CodeGen-16B wrote programs for 126 problems of HumanEval (CodeT, Chen et al. 2022). They are run against the problems'
tests, which gives B-Coder's four rewards. Values are learned from the programs of some problems and rank those of
others, off-policy throughout: another, a hundred times larger model wrote them. Of every problem the programs are the
first ``--programs`` that are short enough, as they were sampled, by default all 100; of the k that score highest, does
one pass?

  random              the share of programs that pass; for k > 1 the unbiased estimate of Chen et al. (2021)
  log-probability     of SmolLM2-135M, the program's tokens without the end: per token, and in sum
  human               the same after fine-tuning on the training problems' reference solutions, which people wrote
  rejection           the same after fine-tuning on the training problems' programs that passed; no values
  probe               logistic regression of passing on a program's mean activations, less the mean of its problem's
                      programs: what the frozen model knows of finished programs, without Bellman's equation
  V-only              B-Coder's value stage with alpha = 0: V of the finished program
  B-Coder             both stages; the sum of the rewards that its values imply, and per token
  oracle              the tests themselves

The rewards of a program, ``A + V(s) - gamma V(s')``, sum to its advantages A, to V of the prompt, which all programs of
a problem share, and to ``1 - gamma`` times the other V. So within a problem B-Coder ranks by advantages of its policy,
and like a log-probability their sum falls with the length: both are given in sum (as published) and per token.

The published study ranks programs of a 770M model by a value of the same size, trained on 1.4 million programs of APPS.
It claims that ranked programs pass more often than programs as they were sampled, *random* here, and has no
log-probability beside them. This one runs on two cores, so the language model is frozen and read once
(`rl.language.cached`); what is trained is a transformer block above it, for the policy and the value each, and the
logits cover the tokens that occur in the programs or are likeliest at some place. The anchors of B-Coder and the
rejection baseline both copy the programs that passed; nothing but ``human`` sees code that people wrote. Values lie in
[-2, 2] where returns lie in [-1, 1], so that the paper's bound R_max does not act: V has to make room for advantages.

Activations are those after several blocks of the frozen model (``--layers``): the trained block reads those of the last
one, and those below through products that start at zero.

Problems are divided once: ``--development`` of them serve to choose settings and are never held out in what is
reported; the others are held out fold by fold, each once, and every fold is trained with ``--seeds`` seeds. A problem's
number is the mean over seeds. Intervals are Student's over the held-out problems, differences are paired by problem,
and their p is of a permutation test that flips signs. One trained model ranks all problems of a fold, so that these are
not quite independent, which neither the intervals nor the test take into account.
Learning rates come from five looks at 13 of the development problems, with one head and 16 programs each: with faster
steps V ends constant.

The 9,645 distinct programs have 654,000 tokens, and what was read of them stays in ``--cache``. On one core of a Xeon
(Sapphire Rapids) reading takes two to four hours, once. Every seed takes three.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from experiments import studies
from rl import log, plot, statistics, train
from rl.agents import bcoder, lm_bc
from rl.data.recipes.collector import default_folder
from rl.data.steps import digest
from rl.language import cached, model, pretrained, ranking, tokenizer
from rl.language.cached import Batch, Store
from rl.language.model import Config
from rl.programs.pool import REWARDS, Limits, Pool, Verdict
from rl.programs.problems import read_humaneval, read_samples
from rl.replay import tokens as replay
from rl.settings import require_at_least_one
from rl.types import Array, Key, Learner, Params, State, TokenBatch
from rl.values import heads

PUBLISHED = studies.published("bcoder")
PROBLEMS, SAMPLES = "HumanEval.jsonl.gz", "humaneval_codegen16b_samples.jsonl.gz"
KS = (1, 5)
BOUNDS = (-2.0, 2.0)  # of values: the rewards' [-1, 1], and room for what the advantages of a program sum to
OTHERS = ("log-probability", "human", "rejection")  # whose scores are likelihoods
VALUES = ("V-only", "B-Coder")  # whose scores are values
CONTROLS = ("log-probability, per token", "log-probability, sum")
PROBE = "probe"
METRICS = (*(f"pass@{k}" for k in KS), "told apart")
TRAINED_ON = "told apart, trained on"  # the same problems in all folds, none of which holds them out
DECAYS = (1.0, 0.1, 0.01, 0.001)  # of the probe's weights, one of which is chosen on the development problems


@dataclasses.dataclass(frozen=True)
class Settings(studies.Settings):
    """What can be chosen about this study."""

    data: str = ""  # folder of HumanEval and the samples; default: programs/ in $HEADWAY_DATA
    model: str = pretrained.SMOLLM2  # the language model: a folder, a .gguf file, or the packaged one
    layers: tuple[int, ...] = (
        10,
        20,
        0,
    )  # blocks of it whose activations are kept; the last one is its top; 0: all
    programs: int = 100  # candidates per problem
    length: int = 639  # the most tokens that a program may have, its end included
    cache: str = ""  # folder for what the model made of the programs; default: ~/.headway/bcoder_rank
    development: int = 26  # problems that are never held out
    tune: bool = False  # hold these out instead, to choose settings
    folds: int = 5  # into which the others are divided
    blocks: int = 1  # trained above the frozen model
    inner: int = 576  # width inside their feed-forward layers
    heads: str = "hl_gauss"  # of B-Coder's values, comma-separated
    value_updates: int = 600  # B-Coder's first stage; and all of V-only
    policy_updates: int = 160  # its second stage; and all of rejection fine-tuning
    rows: int = 2  # per update, each of as many tokens as the longest program may have
    learning_rate: float = 1e-3  # of policies
    value_learning_rate: float = 2e-4  # of V
    alpha: float = 0.1  # B-Coder's temperature
    seeds: int = 3  # of each fold's training
    seed: int = 0  # of everything
    out: str = "results/papers/bcoder_rank"


CHUNK = 20  # updates per call


class Corpus(NamedTuple):
    """Programs, what became of them and what the frozen model makes of them: ``N`` texts, ``P`` places.

    A text's places are the prompt's last token and its own. The last text of a problem is the reference solution if it
    is short enough, and no candidate unless it was sampled, too.
    """

    names: np.ndarray  # [problems] str
    candidates: np.ndarray  # [problems, m] int, which text; the same one several times, if it was sampled so
    human: np.ndarray  # [problems] int, which text a person wrote; -1: none
    verdict: np.ndarray  # [N] int, `Verdict`
    start: np.ndarray  # [N + 1] int, a text's first place
    token: np.ndarray  # [P] int32, of the language model
    activation: np.ndarray  # [P, K, D] float16, at K depths
    log_prob: np.ndarray  # [P] float32, 0 at a text's first place
    best: np.ndarray  # [P] int32, likeliest next token


def run(settings: Settings) -> dict[str, Any]:
    """Everything from the files of programs to the table; returns what result.json holds.

    Raises:
      FileNotFoundError: no programs where ``settings.data`` says; the message has the remedy.
      ValueError: settings out of range.
    """
    _check(settings)
    began = time.time()
    language_model = pretrained.load(settings.model)
    frozen, params, depths = _lower(language_model.config, language_model.params, settings.layers)
    corpus = prepare(settings, language_model, frozen, params, depths)
    read = time.time()
    folds = divide(settings, len(corpus.names))
    if any((corpus.human[fold.trained_on] < 0).all() for fold in folds):
        raise ValueError(
            f"a fold has no problem to train on whose reference solution has at most --length={settings.length} tokens"
        )
    bench = _Bench(settings, corpus, frozen, params)
    arms = bench.arms()
    chosen = {**studies.chosen(settings, "data", "cache", "heads", "seeds"), "corpus": fingerprint(corpus)}
    variants = {
        _variant(number, seed, name): studies.Variant(
            functools.partial(train_arm, bench, name, fold, 1000 * (settings.seed + seed) + number),
            {**chosen, "fold": number},
            arm.updates,
        )
        for seed in range(settings.seeds)
        for number, fold in enumerate(folds)
        for name, arm in arms.items()
    }
    finished = studies.train(settings, variants, "updates")
    outcomes = []
    for number, fold in enumerate(folds):
        fixed = bench.controls() | {PROBE: bench.probe(fold)}
        outcomes.append([])
        for seed in range(settings.seeds):
            trained = [finished.outcomes[_variant(number, seed, name)] for name in arms]
            outcomes[-1].append(outcome(corpus, fold, functools.reduce(dict.__or__, trained, fixed)))
    every = joined(outcomes)
    rows = {
        "reading_seconds": read - began,
        "wall_seconds": read - began + finished.seconds,
        "corpus": describe(corpus),
        "problems": np.concatenate([corpus.names[fold.held_out] for fold in folds]),
        "arms": summary(every),
        "differences": differences(every),
    }
    result = studies.finish(settings, rows, report, claims, trained=finished)
    draw(Path(settings.out), result)
    return result


def _variant(fold: int, seed: int, arm: str) -> str:
    return f"fold {fold + 1}, seed {seed}, {arm}"


def train_arm(bench: _Bench, name: str, fold: Fold, seed: int, work: studies.Work) -> dict[str, np.ndarray]:
    """One arm on one fold: {way to score: [N] scores of the texts of the held-out and the probed problems}."""
    return bench.scores(name, fold, jax.random.key(seed), work.progress)


def fingerprint(corpus: Corpus) -> str:
    """A digest of the programs, what became of them, and what the model made of them."""
    digest = hashlib.sha256()
    for array in (corpus.candidates, corpus.human, corpus.verdict, corpus.token, corpus.activation):
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _check(settings: Settings) -> None:
    if settings.folds < 2 and not settings.tune:
        raise ValueError(f"--folds={settings.folds}: an interval over folds needs at least 2")
    if settings.programs < max(KS):
        raise ValueError(f"--programs={settings.programs}: pass@{max(KS)} needs at least {max(KS)}")
    studies.names("heads", settings.heads, heads.NAMES)
    require_at_least_one(settings, "seeds", "rows", prefix="--")
    for name in ("value_updates", "policy_updates"):
        if getattr(settings, name) % CHUNK:
            raise ValueError(f"--{name}={getattr(settings, name)} must be a multiple of {CHUNK}")


# ---- programs -----------------------------------------------------------------------------------------------------


def folder_of(data: str) -> Path:
    """Where the programs lie.

    Raises:
      FileNotFoundError: not there.
    """
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(data) if data else Path(os.environ.get("HEADWAY_DATA", beside)) / "programs"
    absent = [name for name in (PROBLEMS, SAMPLES) if not (folder / name).exists()]
    if absent:
        raise FileNotFoundError(
            f"no {' and no '.join(absent)} in {folder}: name the folder with --data. The first is in OpenAI's "
            "human-eval repository; the second is CodeT's, CodeGen-16B's samples for HumanEval, under that name"
        )
    return folder


def prepare(
    settings: Settings, base: pretrained.Pretrained, config: Config, params: Params, depths: Sequence[int]
) -> Corpus:
    """Runs and reads the programs of one problem after another; what was done before is taken from the cache."""
    folder = folder_of(settings.data)
    cache = Path(settings.cache) if settings.cache else default_folder("bcoder_rank")
    cache.mkdir(parents=True, exist_ok=True)
    problems = {problem.name: problem for problem in read_humaneval(folder / PROBLEMS)}
    # A line end, for models whose files name no end.
    end = base.end if base.end is not None else tokenizer.continuation(base.tokenizer, "\n")[-1]
    samples = read_samples(folder / SAMPLES)
    lengths = [settings.length // 2**k for k in (4, 3, 2, 1, 0) if settings.length // 2**k >= 4]
    read = cached.reader(model.make(config), 8, lengths, depths)
    weights, params = digest(params), jax.device_put(params)
    names, parts = [], []
    with Pool(limits=Limits(seconds=3)) as pool, log.progress(len(samples), "problems run and read") as bar:
        for sample in samples:
            bar.update(1)
            problem = problems[sample.name]
            solution = problem.reference.removeprefix(problem.prompt)
            texts = {
                text: [*tokenizer.continuation(base.tokenizer, text), end]
                for text in (*sample.completions, solution)
            }
            chosen = [text for text in sample.completions if 1 < len(texts[text]) <= settings.length]
            if len(chosen) < settings.programs:
                continue
            chosen = chosen[: settings.programs]
            distinct = list(dict.fromkeys([*chosen, solution]))
            if not 1 < len(texts[solution]) <= settings.length:
                distinct.remove(solution)
            key = repr(
                (
                    settings.model,
                    weights,
                    config,
                    depths,
                    settings.length,
                    problem.tests,
                    sample.prompt,
                    chosen,
                    distinct,
                )
            )
            path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
            if not path.exists():
                verdicts = pool.run([(problem, sample.prompt + text) for text in distinct])
                before = tokenizer.prompt(base.tokenizer, sample.prompt)
                readings = read(params, before, [texts[text] for text in distinct])
                part = _part(
                    [distinct.index(text) for text in chosen],
                    distinct.index(solution) if solution in distinct else -1,
                    verdicts,
                    [[before[-1], *texts[text]] for text in distinct],
                    readings,
                )
                with log.replacing(path) as partial, open(partial, "wb") as file:
                    np.savez(file, **part)
            with np.load(path) as held:
                parts.append(dict(held))
            names.append(sample.name)
    if not parts:
        raise ValueError(
            f"no problem has --programs={settings.programs} of at most --length={settings.length} tokens"
        )
    return join(names, parts)


def _part(
    candidates: Sequence[int],
    human: int,
    verdicts: Sequence[Verdict],
    tokens: Sequence[Sequence[int]],
    readings: Sequence[cached.Reading],
) -> dict[str, np.ndarray]:
    """One problem alone, as `Corpus` has all: texts are counted from 0, and have a size in place of a start."""
    return {
        "candidates": np.array(candidates),
        "human": np.array(human),
        "verdict": np.array([verdict.value for verdict in verdicts]),
        "size": np.array([len(one) for one in tokens]),
        "token": np.concatenate(tokens).astype(np.int32),
        "activation": np.concatenate([one.activation for one in readings]),
        "log_prob": np.concatenate([np.pad(one.log_prob, (1, 0)) for one in readings]),
        "best": np.concatenate([one.best for one in readings]),
    }


def join(names: Sequence[str], parts: Sequence[Mapping[str, np.ndarray]]) -> Corpus:
    """Numbers the texts of all problems through."""
    before = np.cumsum([0, *(len(part["verdict"]) for part in parts[:-1])])
    candidates = [part["candidates"] + first for part, first in zip(parts, before, strict=True)]
    human = [
        part["human"] + first if part["human"] >= 0 else -1 for part, first in zip(parts, before, strict=True)
    ]
    of_texts = ("verdict", "size", "token", "activation", "log_prob", "best")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in of_texts}
    start = np.concatenate([[0], np.cumsum(joined.pop("size"))])
    return Corpus(np.array(names), np.stack(candidates), np.array(human), start=start, **joined)


def describe(corpus: Corpus) -> dict[str, Any]:
    """Counts, and the share that passes."""
    of_candidates = corpus.verdict[corpus.candidates]
    texts = np.unique(corpus.candidates)
    return {
        "problems": len(corpus.names),
        "candidates": corpus.candidates.size,
        "distinct": len(texts),
        "tokens": int(np.diff(corpus.start)[texts].sum()) - len(texts),
        "human": int((corpus.human >= 0).sum()),
        "verdicts": {v.name.lower(): float((of_candidates == v.value).mean()) for v in Verdict},
    }


class Fold(NamedTuple):
    """Problems by their numbers."""

    development: np.ndarray

    held_out: np.ndarray
    trained_on: np.ndarray
    probed: np.ndarray  # of those trained on, the same in all folds: how well is known what was seen?


def divide(settings: Settings, problems: int) -> list[Fold]:
    """The folds that are reported, or the one that settings are chosen on.

    Raises:
      ValueError: too few problems.
    """
    order = np.random.default_rng(settings.seed).permutation(problems)
    development, others = order[: settings.development], order[settings.development :]
    if len(others) < settings.folds or not len(development):
        raise ValueError(
            f"{problems} problems do not divide into --development={settings.development} and "
            f"--folds={settings.folds}"
        )
    held_out = [development] if settings.tune else np.array_split(others, settings.folds)
    probed = (others if settings.tune else development)[: min(map(len, held_out))]
    return [Fold(development, part, order[~np.isin(order, part)], probed) for part in held_out]


# ---- training -----------------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """A way to score programs that has to be trained."""

    learner: Learner
    updates: int
    places: Callable[[State, Batch], Array]  # [B, T], what it says of each token
    # of what it says of a program's tokens -> {suffix: score}
    scores: Callable[[np.ndarray], dict[str, float]]
    learns_from: str = "programs"  # or "human"


class Data(NamedTuple):
    """What an epoch reads."""

    rows: TokenBatch  # [N, length], tokens are places
    store: Store
    index: Array  # [N] int32, the rows to train on come first
    count: Array  # [], how many these are


class _Bench:
    """Compiled once: the programs on the device, and every arm's epoch."""

    def __init__(self, settings: Settings, corpus: Corpus, frozen: Config, params: Params) -> None:
        self.settings, self.corpus = settings, corpus
        texts = {"programs": corpus.candidates, "human": corpus.human[:, None]}
        packed = {name: pack(corpus, which, settings.length + 1) for name, which in texts.items()}
        table = params["embedding" if frozen.tied else "unembedding"]
        store = cached.store(corpus.token, corpus.activation, corpus.best, table)
        self.store = jax.device_put(store)
        self.rows = {name: jax.device_put(rows) for name, (rows, _) in packed.items()}
        self.owner = {name: owner for name, (_, owner) in packed.items()}
        self.build = cached.on_top(
            frozen, params, settings.blocks, settings.inner, corpus.activation.shape[1]
        )
        self.compiled: dict[str, Any] = {}

    def arms(self) -> dict[str, Arm]:
        settings, build = self.settings, self.build
        config = lm_bc.Config(learning_rate=settings.learning_rate)
        cloning = Arm(
            cached.learner(lambda lm: lm_bc.make(config, lm, heads.scalar()), build),
            settings.policy_updates,
            lambda state, batch: cached.log_probabilities(build, state.params["policy"], batch),
            likelihoods,
        )
        return {
            "human": cloning._replace(learns_from="human"),
            "rejection": cloning,
            "V-only, hl_gauss": self._bcoder("hl_gauss", 0.0),
            **{f"B-Coder, {head}": self._bcoder(head, settings.alpha) for head in settings.heads.split(",")},
        }

    def _bcoder(self, name: str, alpha: float) -> Arm:
        settings, build, head = self.settings, self.build, heads.make(name, *BOUNDS, 101)
        config = bcoder.Config(
            alpha=alpha,
            maximum=BOUNDS[1],
            value_updates=settings.value_updates,
            value_learning_rate=settings.value_learning_rate,
            learning_rate=settings.learning_rate,
        )

        def places(state: State, batch: Batch) -> Array:
            judgement = bcoder.token_values(config, build(batch), head)(state, batch.tokens)
            return judgement.score if alpha else judgement.v

        return Arm(
            cached.learner(lambda lm: bcoder.make(config, lm, head), build),
            settings.value_updates + (settings.policy_updates if alpha else 0),
            places,
            normalised if alpha else lambda token_scores: {"": float(token_scores[-1])},
        )

    def controls(self) -> dict[str, np.ndarray]:
        """{way to score: [N] scores of all texts} of the frozen model's log-probabilities."""
        scores = {name: np.zeros(len(self.corpus.verdict)) for name in CONTROLS}
        for text, log_prob in self._texts(self.corpus.log_prob):
            for suffix, score in likelihoods(log_prob).items():
                scores[f"log-probability{suffix}"][text] = score
        return scores

    @functools.cached_property  # of all folds
    def _features(self) -> np.ndarray:
        return centred(self.corpus)

    def probe(self, fold: Fold) -> np.ndarray:
        """[N] scores of all texts by a logistic regression of passing on their mean activations.

        It is fitted to the candidates of the problems trained on, with the decay whose fit to those outside of
        development tells the development problems' programs apart best.
        """
        corpus, features = self.corpus, self._features
        passed = (corpus.verdict == Verdict.PASSED.value).astype(float)

        def fitted(problems: np.ndarray, decay: float) -> np.ndarray:
            texts = np.unique(corpus.candidates[problems])
            return features @ logistic(features[texts], passed[texts], decay)

        def development(decay: float) -> float:
            scores = fitted(np.setdiff1d(fold.trained_on, fold.development), decay)[corpus.candidates]
            right = passed[corpus.candidates].astype(bool)
            return float(np.nanmean(told_apart(right[fold.development], scores[fold.development])))

        tuning = np.isin(fold.development, fold.held_out).any()
        return fitted(fold.trained_on, DECAYS[0] if tuning else max(DECAYS, key=development))

    def scores(
        self, name: str, fold: Fold, key: Key, finished: Callable[[int], Any]
    ) -> dict[str, np.ndarray]:
        """{way to score: [N] scores} of a trained arm, for the texts of the held-out and the probed problems."""
        scores: dict[str, np.ndarray] = {}
        owner, arm = self.owner["programs"], self.arms()[name]
        scored = np.flatnonzero(np.isin(owner, np.concatenate([fold.held_out, fold.probed])))
        state = self._train(name, arm, self._data(arm.learns_from, fold), key, finished)
        for text, token_scores in self._texts(self._say(name, arm, state, scored)):
            for suffix, score in arm.scores(token_scores).items():
                scores.setdefault(name + suffix, np.zeros(len(self.corpus.verdict)))[text] = score
        return scores

    def _data(self, name: str, fold: Fold) -> Data:
        seen = np.isin(self.owner[name], fold.trained_on)
        return Data(self.rows[name], self.store, jnp.asarray(np.argsort(~seen)), jnp.asarray(seen.sum()))

    def _train(self, name: str, arm: Arm, data: Data, key: Key, finished: Callable[[int], Any]) -> State:
        if name not in self.compiled:
            epoch = train.scan_updates(arm.learner.update, self._sample, CHUNK)
            self.compiled[name] = jax.jit(epoch, donate_argnums=0), jax.jit(arm.places)
        example = self._sample(data, key)
        state = jax.jit(arm.learner.init)(key, example)
        for _ in range(arm.updates // CHUNK):
            state, report = self.compiled[name][0](state, data, key)
            train.check_finite(report)
            finished(CHUNK)
        return state

    def _sample(self, data: Data, key: Key, step: Array | int = 0) -> Batch:
        del step
        index = data.index[jax.random.randint(key, (self.settings.rows,), 0, data.count)]
        return cached.gather(replay.take(data.rows, index), data.store)

    def _say(self, name: str, arm: Arm, state: State, rows: np.ndarray) -> np.ndarray:
        """What the arm says of the places in ``rows``, [P]; 0 elsewhere."""
        token_scores, width = np.zeros(len(self.corpus.token), np.float32), 2 * self.settings.rows
        for start in range(0, len(rows), width):
            index = np.resize(rows[start : start + width], width)
            held = replay.take(self.rows["programs"], index)
            values = np.asarray(self.compiled[name][1](state, cached.gather(held, self.store)))
            used = np.asarray(held.is_action)
            token_scores[np.asarray(held.tokens)[used]] = values[used]
        return token_scores

    def _texts(self, token_scores: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Of each text the scores of its own tokens, without the prompt's."""
        start = self.corpus.start
        return ((text, token_scores[start[text] + 1 : start[text + 1]]) for text in range(len(start) - 1))


def normalised(token_scores: np.ndarray) -> dict[str, float]:
    """Scores of a program whose tokens have these scores."""
    return {", per token": float(token_scores.mean()), ", sum": float(token_scores.sum())}


def likelihoods(log_prob: np.ndarray) -> dict[str, float]:
    """Scores of a program whose tokens, the end last, have these log-probabilities."""
    return normalised(log_prob[:-1])


def centred(corpus: Corpus) -> np.ndarray:
    """The mean activations [N, K D] of each text's tokens, less the mean of its problem's, in units of deviation."""
    ends = corpus.start[1:] - 1
    means = np.stack([
        corpus.activation[first + 1 : last + 1].astype(np.float32).mean(0).ravel()
        for first, last in zip(corpus.start[:-1], ends, strict=True)
    ])  # fmt: skip
    for texts, human in zip(corpus.candidates, corpus.human, strict=True):
        distinct = np.unique([*texts, *([human] if human >= 0 else [])])
        means[distinct] -= means[np.unique(texts)].mean(0)
    return means / (means.std(0) + 1e-6)


def logistic(features: np.ndarray, labels: np.ndarray, decay: float) -> np.ndarray:
    """Weights [D] of the logistic regression of labels [N], 0 or 1, on features [N, D]; ``decay`` keeps them small."""
    features = features.astype(float)  # once, not in each of the products below

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        logits = features @ parameters[1:] + parameters[0]
        error = scipy.special.expit(logits) - labels
        mean = (
            np.mean(np.logaddexp(0, logits) - labels * logits) + decay / 2 * parameters[1:] @ parameters[1:]
        )
        slope = features.T @ error / len(labels) + decay * parameters[1:]
        return mean, np.concatenate([[error.mean()], slope])

    start = np.zeros(features.shape[1] + 1)
    return scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x[1:]


def pack(corpus: Corpus, texts: np.ndarray, length: int) -> tuple[TokenBatch, np.ndarray]:
    """Rows [R, length] whose tokens are places, and whose they are [R]: no row holds programs of two problems.

    Args:
      corpus: all texts.
      texts: [problems, n] which to pack, each once; -1: none.
      length: of a row, at least that of the longest text.
    """
    parts, owner = [], []
    for problem, programs in enumerate(texts):
        episodes = [_episode(corpus, text) for text in dict.fromkeys(programs) if text >= 0]
        if not episodes:
            continue
        rows = replay.pack(episodes, length, bounds=(-1, 1))
        parts.append(rows)
        owner += [problem] * len(rows.tokens)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts), np.array(owner)


def _episode(corpus: Corpus, text: int) -> replay.Episode:
    place = np.arange(corpus.start[text], corpus.start[text + 1], dtype=np.int32)
    verdict = Verdict(corpus.verdict[text])
    reward = np.zeros(len(place), np.float32)
    reward[-1] = REWARDS[verdict]
    passed = float(verdict == Verdict.PASSED)
    return replay.Episode(place, np.arange(len(place)) > 0, reward, terminated=True, imitate=passed)


def _lower(config: Config, params: Params, layers: Sequence[int]) -> tuple[Config, Params, list[int]]:
    """The model without the blocks above the last of ``layers``, and these, 0 being all."""
    depths = [layer or config.shape.layers for layer in layers]
    if not depths or depths != sorted(set(depths)) or not 0 < depths[0] <= depths[-1] <= config.shape.layers:
        raise ValueError(
            f"--layers={','.join(map(str, layers))}: name blocks in their order, of which the model has "
            f"{config.shape.layers}"
        )
    shape = dataclasses.replace(config.shape, layers=depths[-1])
    blocks = jax.tree.map(lambda x: x[: depths[-1]], params["blocks"])
    return dataclasses.replace(config, shape=shape), {**params, "blocks": blocks}, depths


# ---- what came out ------------------------------------------------------------------------------------------------


def outcome(corpus: Corpus, fold: Fold, scores: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """{arm: {metric: [held-out problems]}} of one fold: pass@k, and how well programs are told apart."""
    passed = corpus.verdict[corpus.candidates] == Verdict.PASSED.value
    held_out = passed[fold.held_out]
    arms: dict[str, dict[str, np.ndarray]] = {
        "random": {f"pass@{k}": np.array([ranking.pass_at_k(row[None], k) for row in held_out]) for k in KS},
        "oracle": {f"pass@{k}": held_out.any(1).astype(float) for k in KS},
    }
    for name, of_text in scores.items():
        candidate_scores = of_text[corpus.candidates]
        ranked = list(zip(held_out, candidate_scores[fold.held_out], strict=True))
        arms[name] = {
            f"pass@{k}": np.array([ranking.ranked_pass_at_k(p[None], x[None], k) for p, x in ranked])
            for k in KS
        }
        arms[name]["told apart"] = told_apart(held_out, candidate_scores[fold.held_out])
        arms[name][TRAINED_ON] = told_apart(passed[fold.probed], candidate_scores[fold.probed])
    return arms


def told_apart(passed: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """How often a program that passes scores above one of the same problem that does not, ties counting half.

    Args:
      passed: [problems, m] bool.
      scores: [problems, m].

    Returns:
      [problems], NaN where all pass or none does.
    """
    return np.array([
        np.mean((np.sign(x[p][:, None] - x[~p]) + 1) / 2) if p.any() and not p.all() else np.nan
        for p, x in zip(passed, scores, strict=True)
    ])  # fmt: skip


Every = Mapping[str, Mapping[str, np.ndarray]]  # {arm: {metric: [seeds, problems]}}


def joined(outcomes: Sequence[Sequence[Every]]) -> Every:
    """The `outcome` of every fold and seed, problems of all folds one after another.

    Problems that were trained on are the same in all folds, of which they have the mean.
    """

    def joint(name: str, metric: str) -> np.ndarray:
        folds = [np.array([one[name][metric] for one in seeds]) for seeds in outcomes]
        return np.mean(folds, 0) if metric == TRAINED_ON else np.concatenate(folds, 1)

    first = outcomes[0][0]
    return {name: {metric: joint(name, metric) for metric in metrics} for name, metrics in first.items()}


def summary(every: Every) -> dict[str, dict[str, Any]]:
    """Of every arm and metric the mean and its interval over problems (`problem`), and each seed's mean."""
    return {
        name: {metric: _over_problems(values, rate=True) for metric, values in metrics.items()}
        for name, metrics in every.items()
    }


def differences(every: Every) -> dict[str, dict[str, Any]]:
    """Of each arm with values to each way of scoring without: paired by problem, with the p of a permutation test."""
    values = [name for name in every if name.startswith(VALUES)]
    others = [name for name in every if name.startswith((*OTHERS, PROBE))]
    rows = {}
    for name, other, metric in itertools.product(values, others, METRICS):
        each = _over_problems(every[name][metric] - every[other][metric])
        flipped = scipy.stats.permutation_test(
            (_known(each["problem"]),), np.mean, permutation_type="samples", rng=np.random.default_rng(0)
        )
        rows[f"{name} - {other}, {metric}"] = {**each, "p": float(flipped.pvalue)}
    return rows


def _known(values: Any) -> np.ndarray:
    array = np.asarray(values, float)
    return array[np.isfinite(array)]


def _over_problems(values: np.ndarray, *, rate: bool = False) -> dict[str, Any]:
    """Mean and interval over problems of [seeds, problems], those left out that have no value."""
    problem = values.mean(0)
    if not np.isfinite(problem).any():
        return {"mean": np.nan, "ci95": [np.nan] * 2, "problem": problem, "seeds": [np.nan] * len(values)}
    estimate = {**statistics.summary(_known(problem), rate=rate), "problem": problem}
    del estimate["each"]
    return {**estimate, "seeds": np.nanmean(values, 1)}


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """The paper's: better than random. Ours: better than both log-probabilities, before and after fine-tuning."""
    published = "B-Coder (Yu et al., ICLR 2024): values rank programs; beside likelihoods ours"
    arms = result["arms"]
    values = [name for name in arms if name.startswith(VALUES)]
    for arm, k in itertools.product(values, KS):
        on = (
            f"{_gains(data, k)} points on {data.upper()} (table {n})"
            for data, n in (("mbpp", 4), ("apps", 3))
        )
        text = f"{arm} ranks better than random, pass@{k} (difference)"
        source = f"{', '.join(on)}: B-Coder (Yu et al., ICLR 2024)"
        yield studies.Claim(text, source, over_random(arms, arm, k), studies.positive)
    for arm in values:
        for other, metric in itertools.product(OTHERS, METRICS):
            ways = [name for name in arms if name.startswith(other)]
            ours = np.asarray(arms[arm][metric]["problem"], float)
            gains = [_known(ours - arms[name][metric]["problem"]) for name in ways]
            least = min(gains, key=lambda gain: statistics.interval(gain).low)
            text = f"{arm} ranks better than {other}, per token and in sum, {metric} (lesser gain)"
            yield studies.Claim(text, published, least, studies.positive)


def over_random(arms: Mapping[str, Any], arm: str, k: int) -> np.ndarray:
    """What a way to rank adds to pass@k of programs as they were sampled, [problems]."""
    return np.asarray(arms[arm][f"pass@{k}"]["problem"], float) - arms["random"][f"pass@{k}"]["problem"]


def _gains(data: str, k: int) -> str:
    """The smallest and the largest published gain of ranking, over temperatures, in points."""
    gains = [row["gain"] for row in PUBLISHED[data] if row["k"] == k]
    return f"{min(gains):+.2f} to {max(gains):+.2f}"


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Pass@k of every way to rank, and what values add to the model's own log-probability."""
    for k in KS:
        plot.bars(
            folder / f"pass_at_{k}.png",
            {name: studies.band(row[f"pass@{k}"]) for name, row in result["arms"].items()},
            f"pass@{k} on held-out problems, 95 % interval over problems",
            title=f"{result['settings']['programs']} programs of CodeGen-16B per problem, ranked",
            rate=True,
        )
    scored = {name: row for name, row in result["arms"].items() if "told apart" in row}
    plot.bars(
        folder / "told_apart.png",
        {name: studies.band(row["told apart"]) for name, row in scored.items()},
        "right above wrong, share of pairs (0.5: chance)",
        title="Held-out problems, 95 % interval over them",
        rate=True,
    )


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings, corpus = result["settings"], result["corpus"]
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in corpus["verdicts"].items())
    yield "# Ranking CodeGen-16B's programs on held-out problems of HumanEval"
    yield (
        f"`{result['command']}`, {result['wall_seconds']:.0f} s on {result['hardware']['cores']} cores, "
        f"{result['reading_seconds']:.0f} s of it running and reading the programs, or finding them in the cache."
    )
    yield (
        f"{corpus['problems']} problems with {settings['programs']} candidates each ({corpus['distinct']} distinct, "
        f"{corpus['tokens']} tokens): {shares}. Trained: {settings['blocks']} block of inner width "
        f"{settings['inner']} above {settings['model']}, {settings['value_updates']} + "
        f"{settings['policy_updates']} updates of {settings['rows']} rows of {settings['length'] + 1} tokens, on "
        f"activations after blocks {', '.join(str(layer or 'last') for layer in settings['layers'])}. "
        f"{corpus['human']} problems have a reference solution that is short enough for *human*. "
        f"{settings['folds']} folds, {settings['seeds']} seeds; {settings['development']} problems are in none of them."
    )
    yield (
        "Mean over held-out problems and seeds [95 % interval over problems]. *Told apart*: how often a right program "
        "scores above a wrong one."
    )
    keys = (*METRICS, TRAINED_ON)
    yield studies.table(
        ("ranked by", *keys),
        [
            (name, *(studies.between(row[key], ".3f") if key in row else "" for key in keys))
            for name, row in result["arms"].items()
        ],
    )
    yield (
        "What ranking adds to programs as they were sampled (*random*), in points, paired by problem. Bold: the "
        "interval leaves out 0. Published: smallest and largest gain over temperatures."
    )
    points = [
        (name, *(statistics.summary(100 * over_random(result["arms"], name, k)) for k in KS))
        for name in result["arms"]
        if name != "random"
    ]
    yield studies.table(
        ("ranked by", *(f"pass@{k}" for k in KS)),
        [
            *((name, *(studies.difference(gain, ".1f") for gain in gains)) for name, *gains in points),
            *(
                (f"B-Coder, published, {data.upper()}", *(_gains(data, k) for k in KS))
                for data in ("mbpp", "apps")
            ),
        ],
    )
    yield (
        "Differences, paired by problem, with the p of a permutation test that flips their signs; nobody corrects it "
        "for the number of rows. Bold: the interval leaves out 0."
    )
    yield studies.table(
        ("values", "against", *(f"{metric} (p)" for metric in METRICS)),
        [
            (
                *pair,
                *(f"{studies.difference(row, '.3f')} ({row['p']:.3f})" for row in rows),
            )
            for pair, rows in paired(result["differences"]).items()
        ],
    )


def paired(rows: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """{the two arms of a difference: its rows, one for each of `METRICS`}."""
    pairs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name, row in rows.items():
        first, second = name.rsplit(", ", 1)[0].split(" - ")
        pairs.setdefault((first, second), []).append(row)
    return pairs


if __name__ == "__main__":
    studies.main(Settings(), run)
