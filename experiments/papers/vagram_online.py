"""VaGraM online (Voelcker et al., ICLR 2022): what a model that knows what values need gains while an agent learns.

    python -m experiments.papers.vagram_online
    python -m experiments.papers.vagram_online --parts=pendulum --models=3x64 --losses=mse,vagram

SAC learns in an environment and in a model of it (`experiments.mbpo`), and alone (`experiments.online`) in as many
environment steps. What is compared:

- environments: Pendulum-v1, cart-pole swing-up with a continuous force (`rl.envs.cartpole`), and Hopper-v5. Ten
  numbers are added to what is observed (`rl.envs.distractors`): *official* are those of the paper's code, which a large
  model can predict and a small one cannot, *noise* nobody can predict; or *none*. All seeds have the same map.
- models: ensembles with layers of 4x200, 3x64 (both the paper's) and 2x16; of Hopper 3x64 alone.
- losses: *mle* is MBPO, *mse* is VaGraM with all weights 1, *vagram*, and two controls. *anisotropic* gives VaGraM's
  weights to other dimensions, by one random permutation for each seed, and tells what a value knows from what uneven
  weights do. *standardised* divides squared errors by the variance of each dimension, asks no value, and tells what a
  value knows from what a choice of units does. VaGraM's weights have mean 1 in each batch, so that no loss has a larger
  step than another, and are of critics as they are at each retraining.
- alone: *sac* makes one update per environment step; *sac, as many updates* as many as with a model.

Distractors reach 20, where what the task needs is about 1, and nobody scales them for the agent, as in the paper's
code. SAC with small networks learns little then, with or without a model. What makes it learn is LayerNorm after every
hidden layer of actor and critics, the same in all runs; the paper's code normalises the last layer's features instead.

No number of the paper's can be found anywhere; where it is repeated it is by a sentence. The budgets are small: fewer
updates per step, smaller agents, smaller ensembles and shorter fits than the paper's, the same for all. ``score`` is 0
at the return of random actions and 100 at that of a good policy. What is claimed is of the *area*, the mean score over
all evaluations of a run: how good the agent was while it learned, which is what a model is for. *Last* is the mean of
the last quarter of them.

All seeds of a run are one program. At the default sizes the stored runs took 5.6 hours of training, without
*standardised*, which adds about a quarter. In 20,000 steps of Hopper no run scored above 15, too little to tell runs
apart; hence 50,000, with as many more fits. Runs with models of 4x200 come last, and the report is written after every
run. A command that is killed loses at most a quarter of the run that it was training, and the same command goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import checks, common, flags, mbpo, online, studies, study_runs
from rl import evaluate, plot, statistics
from rl.data import d4rl
from rl.settings import require_at_least_one


class Task(NamedTuple):
    """An environment, and what is run in it."""

    env: str
    # round returns of random actions and of a good policy; Hopper's are D4RL's
    reference: tuple[float, float]
    distractors: tuple[str, ...]  # of DISTRACTORS
    models: tuple[str, ...]  # of MODELS


NONE, OFFICIAL, NOISE = "none", "official", "noise"
# {name here: what stands behind the environment's}
DISTRACTORS = {NONE: "", OFFICIAL: "+distractors10", NOISE: "+noise10"}
MODELS = {"4x200": (200,) * 4, "3x64": (64,) * 3, "2x16": (16,) * 2}  # {name: widths of layers}
LARGEST = "4x200"
TASKS = {
    "pendulum": Task("Pendulum-v1", (-1230.0, -150.0), tuple(DISTRACTORS), tuple(MODELS)),
    "cartpole": Task("CartPoleSwingUp-v0", (5.0, 200.0), tuple(DISTRACTORS), tuple(MODELS)),
    "hopper": Task("Hopper-v5", d4rl.locomotion_reference("Hopper-v5"), (NONE, OFFICIAL), ("3x64",)),
}
LOSSES = ("mle", "mse", "standardised", "vagram", "anisotropic")
SAC, SAC_MORE = "sac", "sac, as many updates"
ALONE = (SAC, SAC_MORE)
NO_MODEL = "-"

# CPU time of a run at the default sizes, beside its START, on an AMD EPYC.
SECONDS: dict[str, dict[str, float]] = {
    "pendulum": {SAC: 10, SAC_MORE: 45, "4x200": 120, "3x64": 65, "2x16": 55},
    "cartpole": {SAC: 14, SAC_MORE: 60, "4x200": 170, "3x64": 90, "2x16": 75},
    "hopper": {SAC: 250, SAC_MORE: 750, "3x64": 1200},
}
START = 25.0  # compilation

MARGIN = 5.0  # points of score that count as nothing
AUTHORS = "in words, of Hopper: the authors' blog"
EXPECTED = "expected before the study (ours): noise costs no capacity, so that there is none to be saved"


@dataclasses.dataclass(frozen=True)
class Settings(studies.RowSettings):
    """What can be chosen about this study."""

    parts: str = ",".join(TASKS)  # environments, comma-separated
    distractors: str = ",".join(DISTRACTORS)  # what is added to observations, comma-separated
    models: str = ",".join(MODELS)  # sizes of the model, comma-separated
    losses: str = ",".join(LOSSES)  # of the model, comma-separated
    seeds: int = 5  # of each run, in one program
    pendulum_steps: int = 3_000  # environment steps of each seed, a tenth of them random
    cartpole_steps: int = 4_000  # the same in the cart-pole swing-up
    hopper_steps: int = 50_000  # the same in Hopper
    hopper_seeds: int = 2  # of each run in Hopper
    utd: int = 5  # updates of the agent per environment step
    batch_size: int = 64  # rows per update of the agent
    hidden: tuple[int, ...] = (64, 64)  # widths of the agent's layers
    hopper_hidden: tuple[int, ...] = (128, 128)  # the same in Hopper
    hopper_retrainings: int = 50  # fits of a model in Hopper, for --retrainings
    hopper_rollouts: int = 10_000  # after each of these, for --rollouts
    layer_norm: bool = True  # after every hidden layer of the agent
    learning_rate: float = 2e-3  # of the agent
    model_members: int = 2  # networks of the model, all of which make rollouts
    retrainings: int = 20  # a model is fitted every steps / retrainings, from the first tenth on
    model_learning_rate: float = 3e-3  # of the model
    model_batch_size: int = 64  # rows per update and network of the model
    model_patience: int = 3  # a fit stops after this many epochs without improvement of 1 %
    model_max_epochs: int = 20  # or after this many in any case
    rollouts: int = 2_000  # of one step, after each fit
    evaluations: int = 20  # of each run
    eval_episodes: int = 5  # per seed and evaluation
    seed: int = 0  # of all runs
    workdir: str = "runs/vagram_online"  # what is finished, and the runs
    out: str = "results/papers/vagram_online"


class Run(NamedTuple):
    """One agent in one environment, with all its seeds."""

    task: str  # of TASKS
    distractors: str  # of DISTRACTORS
    model: str  # of MODELS; NO_MODEL without one
    method: str  # of LOSSES, or of ALONE

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join(word for word in self if word != NO_MODEL)


def run(settings: Settings) -> dict[str, Any]:
    """Trains what is missing; writes and returns what came out.

    Raises:
      ValueError: an unknown environment, kind of distractors, model or loss, or settings that a run refuses.
    """
    check(settings)
    runs = planned(settings)
    earlier = studies.stored(settings, Run._fields)
    variants = {run.name: variant(settings, run) for run in runs if run not in earlier.rows}

    rows = [(run._asdict(), run.name) for run in runs]
    result = studies.train_rows(settings, variants, rows, report, claims, earlier, planned=len(runs))
    draw(Path(settings.out), result)
    return result


def check(settings: Settings) -> None:
    """Raises ValueError, naming the flag, on what `run` would find out only after an hour."""
    studies.names("parts", settings.parts, TASKS)
    studies.names("distractors", settings.distractors, DISTRACTORS)
    studies.names("models", settings.models, MODELS)
    studies.names("losses", settings.losses, LOSSES)
    studies.check_seeds(settings.seeds)
    studies.check_seeds(settings.hopper_seeds, "hopper_seeds")
    require_at_least_one(settings, "utd", "retrainings", "hopper_retrainings", "evaluations", prefix="--")
    for task in settings.parts.split(","):
        checks.multiple(settings, f"{task}_steps", flag_of(task, "retrainings"))
        checks.multiple(settings, f"{task}_steps", "evaluations")
    for one in planned(settings):
        script, chosen, _ = training(settings, one)
        script.check(chosen)


def planned(settings: Settings) -> list[Run]:
    """The runs, those first that need no model."""
    runs = []
    for part in settings.parts.split(","):
        task = TASKS[part]
        kinds = [kind for kind in settings.distractors.split(",") if kind in task.distractors]
        models = [model for model in settings.models.split(",") if model in task.models]
        runs += [Run(part, kind, NO_MODEL, method) for kind in kinds for method in ALONE]
        runs += [
            Run(part, kind, model, loss)
            for kind, model, loss in itertools.product(kinds, models, settings.losses.split(","))
        ]
    return list(dict.fromkeys(runs))


# ---- runs -----------------------------------------------------------------------------------------------------


def variant(settings: Settings, run: Run) -> studies.Variant:
    """What is trained for a run, and all that its outcome depends on."""
    script, chosen, config = training(settings, run)
    return studies.Variant(
        functools.partial(trained, script.run, chosen, config, TASKS[run.task].reference),
        {**dataclasses.asdict(chosen), "config": dataclasses.asdict(config)},
        round(seconds(settings, run)),
    )


def training(settings: Settings, run: Run) -> tuple[Any, Any, Any]:
    """The script of a run, a module; its settings; and the agent's hyper-parameters."""
    setting = functools.partial(of_task, settings, run.task)
    steps = setting("steps")
    plain = common.config("sac")
    config = dataclasses.replace(
        plain,
        hidden=setting("hidden"),
        layer_norm=settings.layer_norm,
        network=dataclasses.replace(plain.network, policy_layer_norm=settings.layer_norm),
        learning_rate=settings.learning_rate,
    )
    shared: dict[str, Any] = {
        "env": TASKS[run.task].env + DISTRACTORS[run.distractors],
        "seeds": setting("seeds"),
        "seed": settings.seed,
        "steps": steps,
        "learning_starts": steps // 10,
        "replay": steps,
        "batch_size": settings.batch_size,
        "eval_every": steps // settings.evaluations,
        "eval_episodes": settings.eval_episodes,
        "save_every": steps // settings.evaluations * max(1, settings.evaluations // 4),
        # In this process: environments are cheaper than a process for them.
        "env_processes": 0,
        "eval_processes": 0,
        "tensorboard": False,
    }
    if run.method in ALONE:
        utd = 1.0 if run.method == SAC else float(settings.utd)
        return online, online.Settings(**shared, utd=utd), config
    every = steps // setting("retrainings")
    chosen = mbpo.Settings(
        **shared,
        utd=float(settings.utd),
        model_loss=run.method,
        plain_steps=every,  # plain errors are added in the first fit
        model_members=settings.model_members,
        model_elites=settings.model_members,
        model_hidden=MODELS[run.model],
        model_learning_rate=settings.model_learning_rate,
        model_batch_size=settings.model_batch_size,
        model_patience=settings.model_patience,
        model_max_epochs=settings.model_max_epochs,
        retrain_every=every,
        rollouts=setting("rollouts"),
        rollout_length="1",
        model_share=f"0,{steps // 10},0,0.95",
        model_replay=4 * setting("rollouts"),  # of four retrainings, as in the paper
    )
    return mbpo, chosen, config


def flag_of(task: str, name: str) -> str:
    """The setting that a task has for itself (``hopper_seeds``), or else that of all (``seeds``)."""
    return f"{task}_{name}" if hasattr(Settings, f"{task}_{name}") else name


def of_task(settings: Any, task: str, name: str) -> Any:
    """The value of `flag_of`."""
    return getattr(settings, flag_of(task, name))


def seconds(settings: Settings, run: Run) -> float:
    """What a run takes on one core, about: to weigh runs against each other in the time that is left."""
    chosen, default = (
        [of_task(of, run.task, name) for name in ("steps", "seeds")] for of in (settings, Settings)
    )
    method = run.method if run.method in ALONE else run.model
    return START + SECONDS[run.task][method] * np.prod(chosen) / np.prod(default)


def command(settings: Settings, run: Run) -> str:
    """What trains a run outside this study, in a folder of its own."""
    script, chosen, config = training(settings, run)
    words = [
        *flags.written(chosen, script.Settings()),
        *flags.written(config, common.config(chosen.agent), "agent."),
    ]
    return f"python -m {script.__name__} --preset=none {' '.join(words)}"


def trained(
    script: Callable[[Any, Any], Any],
    chosen: Any,
    config: Any,
    reference: tuple[float, float],
    work: studies.Work,
) -> dict[str, Any]:
    """One run of a script.

    Returns the scores of its seeds: their mean over all evaluations, over the last quarter, and all [T, S]. Of one that
    diverges they are drawn and no more; see `study_runs.curve`.
    """
    diverged = study_runs.divergence(script, dataclasses.replace(chosen, workdir=str(work.folder)), config)
    steps, returns = study_runs.curve(work.folder, "eval/return", chosen, bool(diverged), before=reference[0])
    scores = evaluate.normalize(returns, reference)
    return outcome(steps, scores, diverged)


def outcome(steps: np.ndarray, scores: np.ndarray, diverged: str) -> dict[str, Any]:
    """What is kept of a run with scores [T, S]."""
    return {
        "area": statistics.summary(scores.mean(0)),
        "last": statistics.summary(scores[-max(1, len(scores) // 4) :].mean(0)),
        "curve": {"steps": steps, "score": scores},
        "diverged": diverged,
    }


# ---- claims ---------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> dict[Run, Mapping[str, Any]]:
    """The rows of a result by their runs."""
    return {Run(*(row[field] for field in Run._fields)): row for row in result["rows"]}


# {first words of claims: the question that they answer}
QUESTIONS = {
    "capacity": "Official distractors and a small model: does VaGraM gain over plain errors?",
    "noise": "Noise and a small model: does it gain nothing?",
    "control": "Is it what the value knows, and not that weights are uneven?",
    "size": "Nothing added: does a smaller model cost MBPO more than VaGraM?",
    "parity": "Nothing added and a large model: are they alike?",
    "efficiency": "Does a model help at the same number of environment steps?",
}


def claims(result: Mapping[str, Any]) -> Iterator[studies.Claim]:
    """What the paper and the library expect; every claim begins with one of `QUESTIONS`."""
    rows = table(studies.undiverged(result))
    tasks = [task for task in TASKS if task in result["settings"]["parts"].split(",")]
    for judge in (_capacity, _noise, _control, _size, _parity, _efficiency):
        for task in tasks:
            yield from judge(rows, task)


def difference(rows: Mapping[Run, Mapping[str, Any]], one: Run, other: Run) -> np.ndarray | None:
    """The area of one run over that of another, one per seed [S]; None before both are there."""
    if one not in rows or other not in rows:
        return None
    return np.subtract(rows[one]["area"]["each"], rows[other]["area"]["each"])


def smaller(task: str) -> list[str]:
    """The models of a task but for the largest of all."""
    return [model for model in TASKS[task].models if model != LARGEST]


def _claim(
    text: str, source: str, values: np.ndarray | None, predicate: studies.Predicate = studies.positive
) -> Iterator[studies.Claim]:
    """A claim on what was measured, if it was."""
    if values is not None:
        yield studies.Claim(text, source, values, predicate)


def _capacity(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    for model in smaller(task):
        vagram = Run(task, OFFICIAL, model, "vagram")
        for plain, source in (("mse", studies.OURS), ("mle", AUTHORS), ("standardised", studies.OURS)):
            values = difference(rows, vagram, vagram._replace(method=plain))
            text = f"capacity: {task}, official distractors, {model}: vagram scores more than {plain} (difference)"
            yield from _claim(text, source, values)


def _noise(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    for model in smaller(task):
        gains = []
        for kind in (NOISE, OFFICIAL):
            vagram = Run(task, kind, model, "vagram")
            gains.append(difference(rows, vagram, vagram._replace(method="mse")))
        place = f"noise: {task}, {model}: vagram gains over mse"
        yield from _claim(
            f"{place} less than {MARGIN:g} points (difference)",
            EXPECTED,
            gains[0],
            studies.mean_within(high=MARGIN),
        )
        if gains[0] is not None and gains[1] is not None:
            text = f"{place} less than with official distractors (difference of differences)"
            yield from _claim(text, EXPECTED, gains[1] - gains[0])
        vagram = Run(task, NOISE, model, "vagram")
        text = (
            f"noise: {task}, {model}: vagram gains over standardised less than {MARGIN:g} points (difference)"
        )
        values = difference(rows, vagram, vagram._replace(method="standardised"))
        yield from _claim(text, EXPECTED, values, studies.mean_within(high=MARGIN))


def _control(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    for model in smaller(task):
        random = Run(task, OFFICIAL, model, "anisotropic")
        place = f"control: {task}, official distractors, {model}"
        values = difference(rows, random._replace(method="vagram"), random)
        yield from _claim(f"{place}: vagram scores more than anisotropic (difference)", studies.OURS, values)
        values = difference(rows, random, random._replace(method="mse"))
        text = f"{place}: anisotropic gains over mse less than {MARGIN:g} points (difference)"
        yield from _claim(text, studies.OURS, values, studies.mean_within(high=MARGIN))


def _size(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    for model in smaller(task):
        losses = []
        for method in ("mle", "vagram"):
            large = Run(task, NONE, LARGEST, method)
            losses.append(difference(rows, large, large._replace(model=model)))
        if losses[0] is not None and losses[1] is not None:
            text = (
                f"size: {task}, {LARGEST} to {model}: mle loses more than vagram (difference of differences)"
            )
            yield from _claim(text, AUTHORS, losses[0] - losses[1])


def _parity(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    vagram = Run(task, NONE, LARGEST, "vagram")
    values = difference(rows, vagram, vagram._replace(method="mle"))
    text = f"parity: {task}, {LARGEST}: vagram is within {MARGIN:g} points of mle (difference)"
    yield from _claim(text, AUTHORS, values, studies.mean_within(-MARGIN, MARGIN))


def _efficiency(rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[studies.Claim]:
    model = next((one for one in TASKS[task].models if Run(task, NONE, one, "mle") in rows), LARGEST)
    for alone in ALONE:
        values = difference(rows, Run(task, NONE, model, "mle"), Run(task, NONE, NO_MODEL, alone))
        text = f"efficiency: {task}, {model}: mle (MBPO) scores more than {alone} (difference)"
        yield from _claim(text, "MBPO (Janner et al. 2019), in words", values)


# ---- report ---------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The blocks of a Markdown report."""
    settings = Settings(**{name: _tuple(x) for name, x in result["settings"].items()})
    yield "# VaGraM online: models that know what values need, while an agent learns"
    yield (
        f"{studies.origin(result)} {len(result['rows'])} of {result['planned']} runs. "
        f"{studies.program(result, __file__)} says what is compared and what a score is."
    )
    yield (
        f"{settings.utd} updates of the agent per environment step, batches of {settings.batch_size}, "
        f"{settings.model_members} networks in a model, fits of at most "
        f"{settings.model_max_epochs} epochs. "
        "The paper makes 20 to 40 updates with layers of 1024, with 7 networks and fits that end by themselves: these "
        "are small budgets. *Area* is the mean score over all evaluations, with half of Student's 95 % interval "
        "over seeds, and *last* that of the last quarter."
    )
    if result["claims"]:
        yield "## Answers"
        yield answers(result["claims"])
        yield (
            f"Claims are of areas, seed by seed, and nobody corrects them for their number. {MARGIN:g} points count as "
            "nothing. *Open*: the intervals do not tell."
        )
    rows = table(result)
    for task in settings.parts.split(","):
        if any(run.task == task for run in rows):
            yield from task_report(settings, rows, task)
    yield from studies.about_diverged(result)


def _tuple(value: Any) -> Any:
    """Lists of a stored result are arrays; those of settings were tuples."""
    return tuple(int(x) for x in value) if isinstance(value, np.ndarray | list) else value


def answers(judged: list[dict[str, str]]) -> str:
    """How many claims hold that answer each of `QUESTIONS`."""
    lines = []
    for name, question in QUESTIONS.items():
        verdicts = [row["verdict"] for row in judged if row["claim"].startswith(f"{name}:")]
        if verdicts:
            counts = (verdicts.count(verdict) for verdict in (studies.HOLDS, studies.FAILS, studies.OPEN))
            lines.append((question, *counts))
    return studies.table(("question", "holds", "does not hold", "open"), lines)


def task_report(settings: Settings, rows: Mapping[Run, Mapping[str, Any]], task: str) -> Iterator[str]:
    """Scores in one environment, a column for each kind of distractors, and how to make one of them."""
    seeds, steps, retrainings, rollouts = (
        of_task(settings, task, name) for name in ("seeds", "steps", "retrainings", "rollouts")
    )
    fits = len(range(steps // 10, steps, steps // retrainings))  # none before the first updates
    low, high = TASKS[task].reference
    kinds = [kind for kind in settings.distractors.split(",") if kind in TASKS[task].distractors]
    yield f"## {TASKS[task].env}: area (last)"
    yield (
        f"{steps:,} environment steps, {seeds} seeds, {fits} fits of a model with {rollouts:,} rollouts after each. A "
        f"score of 0 is a return of {low:,.0f}, 100 one of {high:,.0f}."
    )
    lines = []
    for model, method in dict.fromkeys((run.model, run.method) for run in rows if run.task == task):
        cells = [rows.get(Run(task, kind, model, method)) for kind in kinds]
        lines.append((model, f"`{method}`", *map(area_last, cells)))
    yield studies.table(("model", "loss", *kinds), lines)
    for run, row in rows.items():
        if run.task == task and row["diverged"]:
            yield f"{run.name} diverged: {row['diverged']}"
    yield "One cell alone, in a folder of its own (scores are those of returns in its log):"
    example = [run for run in rows if run.task == task][-1]
    yield f"```sh\n# {example.name}\n{command(settings, example)}\n```"
    yield f"![{task}]({task}.png)"


def area_last(row: Mapping[str, Any] | None) -> str:
    """Area with half of its interval, and the score at the end."""
    if row is None:
        return "-"
    if row["diverged"]:
        return "diverged"
    return f"{studies.plus_minus(row['area'], '.1f')} ({studies.band(row['last'])[0]:.1f})"


def draw(folder: Path, result: Mapping[str, Any]) -> None:
    """Learning curves of each environment: a row for each model, a panel for each kind of distractors."""
    rows = table(result)
    for task in dict.fromkeys(run.task for run in rows):
        models = dict.fromkeys(run.model for run in rows if run.task == task and run.method not in ALONE)
        models = models or {NO_MODEL: None}
        kinds = dict.fromkeys(run.distractors for run in rows if run.task == task)
        methods = dict.fromkeys(run.method for run in rows if run.task == task)
        place = lambda kind, model, method, task=task: Run(
            task, kind, NO_MODEL if method in ALONE else model, method
        )
        complete = [
            method
            for method in methods
            if all(place(kind, model, method) in rows for model in models for kind in kinds)
        ]
        panels = {
            f"models of {model}, distractors: {kind}": {
                method: tuple(rows[place(kind, model, method)]["curve"][x] for x in ("steps", "score"))
                for method in complete
            }
            for model, kind in itertools.product(models, kinds)
        }
        if complete:
            plot.learning_curves(
                folder / f"{task}.png",
                panels,
                title=TASKS[task].env,
                xlabel="environment steps",
                ylabel="score",
                columns=len(kinds),
            )


if __name__ == "__main__":
    studies.main(Settings(), run)
