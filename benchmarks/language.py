"""Token-level Q-learning: what an update costs beside a plain language-model step, and beside how others write it.

    python -m benchmarks.language

One trunk of random weights, rows without padding, every token but the first an action. Updates run in a compiled loop
over rows drawn by chance, as in experiments.language, PyTorch's one after the other. Timed are

  lm step       fine-tuning (`rl.agents.lm_bc`): the trunk and the logits, forward and backward: the measure
  forward       the trunk alone, forward: what an update's target network or frozen model cannot do without
  ilql          `rl.agents.ilql` without the model that it clones (which is one more `lm step`)
  bcoder value, bcoder policy
                `rl.agents.bcoder`'s two stages; they need one and two forward passes of frozen models
  ... read once the same updates of rows that frozen models have read before, so that they need none
  ... adapters  the same updates of adapters of low rank on one frozen model in bfloat16 (`rl.language.adapters`)
  ... one-hot   the same updates in the manner of LMRL-Gym's code (`benchmarks.language_peer`): values or logits of all
                tokens, and [N, N] selectors for N = batch x (length - 1)
  ... torch     the same updates with PyTorch and transformers' model, where they are installed
  prefill       reading prompts of half the model's context, and of all of it for the memory at twice the length
  generate, generate torch
                sampling with a cache, and transformers' `generate`
  programs      programs of CodeGen-16B judged by `rl.programs` with two workers, where the files are at hand

A round runs each once, and the table holds medians over --repeats rounds. `of aim` is the time of an update by 1.3
times that of the `lm step` plus its unavoidable forward passes: at most 1 is the aim. `x torch` is PyTorch's time by
ours, the median over rounds of both in one round with its 95 % interval (bootstrap over rounds). Memory is what the
compiled update holds beside its arguments, at the length and at twice it, by XLA's own account; a loss that is linear
in the tokens at most doubles it. Bytes per parameter are those of all models that an update holds, target networks and
moments included, value heads and gradients not, by the parameters of one model. Model FLOPs count six per trained
parameter and token and two per frozen one, attention and what is computed twice not counted; --peak_tflops says what
share of the hardware's that is.

Examples:

  On a CPU (minutes):      python -m benchmarks.language
  On a GPU:                python -m benchmarks.language --size=135m --batch=64 --length=512 --bfloat16 --remat
                               --peak_tflops=989
  One question:            python -m benchmarks.language --cases=ilql,"ilql torch"
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from benchmarks import kernels, table, timing
from benchmarks import language_peer as peer
from experiments import flags, studies
from experiments.papers import bcoder_rank
from rl import checkpoint, log, train
from rl.agents import bcoder, ilql, lm_bc
from rl.language import adapters, generate, model, reading
from rl.language.model import LM, Config
from rl.networks.transformer import Shape
from rl.programs.pool import IsolationError, Limits, Pool
from rl.programs.problems import read_humaneval, read_samples
from rl.replay import tokens as replay
from rl.statistics import bootstrap
from rl.types import Array, Learner, Params, State, TokenBatch
from rl.values import heads

SIZES = {
    "tiny": Config(64, 256, Shape(width=16, layers=2, heads=2, kv_heads=1, head_size=8, inner=32)),
    "small": Config(4096, 2048, Shape(width=256, layers=6, heads=8, kv_heads=4, head_size=32, inner=704)),
    "135m": Config(49_152, 8192, Shape(width=576, layers=30, heads=9, kv_heads=3, head_size=64, inner=1536)),
}
MEASURES = ("lm step", "forward")  # what the other rows are measured by
INNER = 256  # width of the value heads' hidden layer
NAIVE = 2**33  # bytes of the largest selector that is tried


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure."""

    size: str = "small"  # of the trunk: tiny, small, or 135m, SmolLM2's
    cases: str = ""  # rows of the table, comma-separated, as in "lm step,forward,ilql"; "": all
    batch: int = 8  # rows per update
    updates: int = 4  # in a compiled loop
    length: int = 128  # tokens per row
    bfloat16: bool = False  # arithmetic of the trunk
    remat: bool = False  # blocks are computed again in the backward pass
    steps: int = 64  # tokens generated per row
    profile: bool = False  # list the kernels of each row too, on a GPU
    rank: int = 8  # of adapters
    programs: int = 600  # run per round; 0: none
    data: str = ""  # their folder, as for experiments.papers.bcoder_rank
    repeats: int = 5  # rounds
    torch: bool = True  # measure PyTorch too, where it is installed with transformers
    peak_tflops: float = 0.0  # of the hardware, for the share of it; 0: not stated
    out: str = ""  # JSON file; by default results/benchmarks/language-HARDWARE.json


class Case(NamedTuple):
    """One row of the table."""

    name: str
    call: Callable[[], Any]  # done when it returns
    work: int  # tokens, or programs, in one update, or in the call where it makes none
    updates: int = 1  # in a call
    flops: float = 0.0  # of the model, as `work`
    forwards: int = 0  # passes of frozen models
    bytes: tuple[int, int] | None = None  # held beside arguments, at the length and at twice it
    bytes_per_parameter: float | None = None  # of the models that an update holds


def run(settings: Settings) -> dict[str, Any]:
    """Measures, writes and returns the results.

    Raises:
      ValueError: an unknown size or row.
    """
    if settings.size not in SIZES:
        raise ValueError(f"--size={settings.size}: choose from {', '.join(SIZES)}")
    versions = peer.versions() if settings.torch else {}
    results: dict[str, Any] = {
        **log.provenance(),
        "settings": dataclasses.asdict(settings),
        "peer": versions,
        "parameters": _sizes(SIZES[settings.size]),
        "rows": [],
    }
    path = table.place(settings.out, "language", results)
    cases = []
    with log.progress(0, "programs compiled") as bar:
        for case in _cases(settings, bool(versions)):
            cases.append(case)
            bar.set_postfix_str(case.name)
            bar.update(1)
    with log.progress(settings.repeats + 1, "rounds") as bar:

        def keep(number: int, times: timing.Seconds) -> None:
            """Writes what there is, in case the next round is killed."""
            bar.update(1)
            results["rows"] = [
                {**case._replace(call=None)._asdict(), "seconds": [x / case.updates for x in seconds]}  # type: ignore[arg-type]
                for case, seconds in zip(cases, times, strict=True)
            ]
            if number:
                table.write(path, results, render(results))

        timing.measure([case.call for case in cases], settings.repeats, keep)
    if settings.profile:
        for row, case in zip(results["rows"], cases, strict=True):
            row["profile"] = kernels.profile(case.call, case.updates)
        table.write(path, results, render(results))
    return results


def example(config: Config, rows: int, length: int) -> TokenBatch:
    """A batch [rows, length] whose tokens are actions all but the first, the last one rewarded."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, config.vocabulary, (rows, length)).astype(np.int32)
    ones = np.ones((rows, length), np.float32)
    is_action = np.broadcast_to(np.arange(length) > 0, tokens.shape)
    last = (np.arange(length) == length - 1) * ones
    return TokenBatch(tokens, np.ones_like(tokens), is_action, last, 1 - last, is_action * ones)


def _sizes(config: Config) -> dict[str, int]:
    """Parameters of the blocks and of the matrix that makes logits, and the tokens of a prompt."""
    shapes = jax.eval_shape(model.make(config).init, jax.random.key(0))
    blocks = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]))
    logits = config.vocabulary * config.shape.width
    return {"blocks": blocks, "logits": logits, "prompt": config.context // 2}


def bytes_per_parameter(held: Any, config: Config) -> float:
    """Bytes of all weights of language models in ``held``, moments and copies too, per parameter of one model."""
    shapes = jax.eval_shape(model.make(config).init, jax.random.key(0))
    weights = [
        leaf
        for path, leaf in checkpoint.named(held).items()
        if re.search("/(blocks|norm|(un)?embedding)(/|$)", path)
    ]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in weights)
    return size / sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _cases(settings: Settings, torch: bool) -> Iterator[Case]:
    """Those that --cases names, compiled, after the two that the others are measured by.

    Raises:
      ValueError: a name that there is not, before anything is compiled.
    """
    known = dict(_known(settings, torch))
    needed = list(MEASURES)
    if settings.cases:
        needed += studies.names("cases", settings.cases, known)
    for name in dict.fromkeys(needed if settings.cases else known):
        case = known[name]()
        if case:
            yield case


def _known(settings: Settings, torch: bool) -> Iterator[tuple[str, Callable[[], Case | None]]]:
    """The name of each row and what compiles it; None for one that cannot run here."""
    config = SIZES[settings.size]
    lm = model.make(config, jnp.bfloat16 if settings.bfloat16 else jnp.float32, settings.remat)
    params = jax.jit(lm.init)(jax.random.key(0))
    lm = model.pretrained(lm, params)
    batch = example(config, settings.batch, settings.length)
    size, tokens = _sizes(config), settings.batch * settings.length
    step = 6.0 * (size["blocks"] + size["logits"]) * tokens  # trained
    once = 2.0 * (size["blocks"] + size["logits"]) * tokens  # frozen, with its logits
    trunk = 2.0 * size["blocks"] * tokens  # frozen, without
    q = 2 * INNER * config.vocabulary  # weights of two members' last layers
    make = _learners()

    def update(name: str, learner: Callable[[], Learner], *others: Any) -> tuple[str, Callable[[], Case]]:
        return name, lambda: _update(settings, config, name, learner(), *others)

    def adapted(name: str, of_model: Callable[[LM], Learner]) -> tuple[str, Callable[[], Case]]:
        learner = functools.partial(adapters.learner, of_model, lm, settings.rank)
        return name, lambda: _update(settings, config, name, learner(), 0.0, 0, base=base())

    def in_torch(name: str, make: Callable[[], Callable[[], Any]]) -> tuple[str, Callable[[], Case]]:
        call = lambda: functools.partial(_several, make(), settings.updates)
        return f"{name} torch", lambda: Case(
            f"{name} torch", call(), tokens, settings.updates, forwards=passes[name]
        )

    yield update("lm step", lambda: make["lm step"](lm), step, 0)
    yield "forward", lambda: _forward(lm, params, batch, trunk)
    yield update("ilql", lambda: make["ilql"](lm), 4 * trunk + 6.0 * q * tokens, 1)
    yield update("bcoder value", lambda: make["bcoder value"](lm), once + 3 * trunk, 1)
    yield update("bcoder policy", lambda: make["bcoder policy"](lm), step + once + trunk, 2)
    reads = {
        "value": jax.jit(functools.partial(bcoder.value_rows, peer.CODER, lm)),
        "policy": jax.jit(functools.partial(bcoder.policy_rows, peer.CODER, lm, heads.scalar())),
    }
    for stage, flops in (("value", 3 * trunk), ("policy", step)):
        learner = functools.partial(make[f"bcoder {stage}"], lm)
        yield update(f"bcoder {stage} read once", learner, flops, 0, reads[stage])
    base = functools.cache(lambda: adapters.frozen(params))
    for name, of_model in make.items():
        yield adapted(f"{name} adapters", of_model)
    stages = "value", "policy"
    passes = {"ilql": 1, "bcoder value": 1, "bcoder policy": 2}  # of frozen models
    if _selectors_fit(tokens):
        naive = {"ilql": functools.partial(peer.one_hot, lm)}
        naive |= {f"bcoder {one}": functools.partial(peer.one_hot_bcoder, lm, one) for one in stages}
        for name, learner in naive.items():
            yield update(f"{name} one-hot", learner, 0.0, passes[name])
    yield "prefill", lambda: _prefill(settings, lm, params)
    yield "generate", lambda: _generation(settings, lm, params, batch)
    if torch:
        manner = peer.Manner(settings.bfloat16, settings.remat)
        yield in_torch("ilql", functools.partial(peer.torch_ilql, config, batch, manner=manner))
        for one in stages:
            make_torch = functools.partial(peer.torch_bcoder, config, batch, one, manner=manner)
            yield in_torch(f"bcoder {one}", make_torch)
        yield "generate torch", lambda: _torch_generation(settings, config, batch, manner)
    yield "programs", lambda: _programs(settings)


def _selectors_fit(tokens: int) -> bool:
    """Whether one-hot selectors of this many tokens are tried."""
    return 4 * tokens**2 <= NAIVE


def _torch_generation(settings: Settings, config: Config, batch: TokenBatch, manner: peer.Manner) -> Case:
    call = peer.torch_generate(config, batch.tokens, settings.steps, manner)
    return Case("generate torch", call, settings.batch * settings.steps)


def _several(update: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        update()


def _learners() -> dict[str, Callable[[LM], Learner]]:
    """{name: what makes the learner whose update is timed, of a model}."""
    scalar, coder = heads.scalar(), functools.partial(dataclasses.replace, peer.CODER)
    return {
        "lm step": lambda lm: lm_bc.make(lm_bc.Config(), lm, scalar),
        "ilql": lambda lm: ilql.make(peer.CONFIG, lm, scalar),
        "bcoder value": lambda lm: bcoder.make(coder(value_updates=-1), lm, scalar),
        "bcoder policy": lambda lm: bcoder.make(coder(value_updates=0), lm, scalar),
    }


def _update(
    settings: Settings,
    config: Config,
    name: str,
    learner: Learner,
    flops: float,
    forwards: int,
    look: Callable[[State, TokenBatch], Any] | None = None,
    base: Params = None,
) -> Case:
    """Updates of one learner in one compiled loop over rows drawn by chance, as `experiments.language` runs them.

    Args:
      look: what frozen models say of rows before the loop, if not in it.
      base: the frozen model of adapters.
    """
    key = jax.random.key(0)
    sample = replay.sampler(settings.batch)
    sample = sample if base is None else adapters.sampler(sample)
    epoch = jax.jit(train.scan_updates(learner.update, sample, settings.updates), donate_argnums=0)
    rows = example(config, settings.updates * settings.batch, settings.length)
    longer = example(config, settings.updates * settings.batch, 2 * settings.length)

    def data(rows: TokenBatch) -> Any:
        return rows if base is None else adapters.Batch(rows, base)

    start = jax.eval_shape(learner.init, key, data(rows))
    inputs = [data(some) if look is None else jax.eval_shape(look, start, some) for some in (rows, longer)]
    held = bytes_per_parameter((start, inputs[0]), config)
    compiled = [epoch.lower(start, one, key).compile() for one in inputs]
    state: State | None = None
    dataset: Any = None

    def call() -> None:
        nonlocal state, dataset
        if state is None:
            state = jax.jit(learner.init)(key, data(rows))
            seen = rows if look is None else reading.in_batches(jax.jit(look), state, rows, settings.batch)
            dataset = jax.device_put(data(seen))
        state, _ = jax.block_until_ready(compiled[0](state, dataset, key))

    tokens = settings.batch * settings.length
    return Case(name, call, tokens, settings.updates, flops, forwards, _temporary(compiled), held)


def _temporary(compiled: Sequence[Any]) -> tuple[int, int]:
    """Bytes that each of two programs holds beside its arguments."""
    once, twice = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    return once, twice


def _forward(lm: LM, params: Params, batch: TokenBatch, flops: float) -> Case:
    features = jax.jit(lm.features)
    return Case(
        "forward",
        lambda: features(params, batch.tokens, batch.segment).block_until_ready(),
        batch.tokens.size,
        flops=flops,
    )


def _prefill(settings: Settings, lm: LM, params: Params) -> Case:
    """Prompts of half the context, into caches."""
    decoder, length = generate.decoder(lm), lm.config.context // 2
    tokens = np.ones((settings.batch, length), np.int32)

    @jax.jit
    def read(params: Params, tokens: Array) -> Any:
        return decoder.extend(params, tokens, jnp.ones_like(tokens), decoder.cache(*tokens.shape))

    compiled = [read.lower(params, np.tile(tokens, times)).compile() for times in (1, 2)]
    return Case(
        "prefill",
        lambda: jax.block_until_ready(compiled[0](params, tokens)),
        tokens.size,
        bytes=_temporary(compiled),
    )


def _generation(settings: Settings, lm: LM, params: Params, batch: TokenBatch) -> Case:
    sample = generate.generator(generate.decoder(lm), settings.steps)
    return Case(
        "generate",
        lambda: jax.block_until_ready(sample(params, batch.tokens, batch.segment, jax.random.key(0))),
        settings.batch * settings.steps,
    )


def _programs(settings: Settings) -> Case | None:
    """Distinct programs of CodeGen-16B, drawn by chance; None where the files or any isolation are absent."""
    try:
        folder = bcoder_rank.folder_of(settings.data)
    except FileNotFoundError:
        if settings.data:
            raise
        return None
    if not settings.programs:
        return None
    try:
        Pool(1).close()
    except IsolationError:
        return None
    problems = {problem.name: problem for problem in read_humaneval(folder / bcoder_rank.PROBLEMS)}
    samples = read_samples(folder / bcoder_rank.SAMPLES)
    every = [(problems[one.name], one.prompt + text) for one in samples for text in one.completions]
    distinct = list(dict.fromkeys(every))
    chosen = np.random.default_rng(0).permutation(len(distinct))[: settings.programs]

    def call() -> None:
        with Pool(2, limits=Limits(seconds=1)) as pool:  # a new one: it remembers its verdicts
            pool.run([distinct[number] for number in chosen])

    return Case("programs", call, len(chosen))


def render(results: Mapping[str, Any]) -> str:
    """The table as Markdown, with where it is from."""
    settings, rows = results["settings"], {row["name"]: row for row in results["rows"]}
    median = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    compared = {name: f"{name.removesuffix(' one-hot')} torch" for name in rows}
    head = ("", "tokens/s", "x lm step", "of aim", "x torch", "MB held", "at twice", "bytes/parameter")
    cells = [(*head, "model TFLOP/s")]
    if settings["peak_tflops"]:
        cells[0] += ("of peak",)  # type: ignore[assignment]
    for name, row in rows.items():
        seconds, held = median[name], row["bytes_per_parameter"]
        aim = 1.3 * median["lm step"] + row["forwards"] * median["forward"]
        theirs = rows.get(compared[name])
        rate = row["flops"] / seconds / 1e12
        cells.append(
            (
                name,
                studies.digits(row["work"] / seconds),
                studies.digits(seconds / median["lm step"]) if held else "",
                f"{seconds / aim:.2f}" if row["forwards"] else "",
                _ratio(theirs["seconds"], row["seconds"]) if theirs else "",
                *(studies.digits(size / 1e6) if size else "" for size in row["bytes"] or (0, 0)),
                f"{held:.2f}" if held else "",
                f"{rate:.3f}" if row["flops"] else "",
                *(
                    [f"{rate / settings['peak_tflops']:.1%}" if rate else ""]
                    if settings["peak_tflops"]
                    else []
                ),
            )
        )
    sizes = results["parameters"]
    notes = [
        "",
        f"{settings['batch']} x {settings['length']} tokens; {sizes['blocks'] / 1e6:.1f}M parameters in blocks, "
        f"{sizes['logits'] / 1e6:.1f}M make logits. Adapters have rank {settings['rank']}; prompts of the row "
        f"`prefill` have {sizes['prompt']} tokens. The row `programs` counts programs per second.",
    ]
    if not _selectors_fit(settings["batch"] * settings["length"]):
        notes.append("One-hot selectors would be too large for this batch.")
    if not results["peer"]:
        notes.append("PyTorch and transformers are not installed, or were left out.")
    notes += [f"{name}: {kernels.text(row['profile'])}." for name, row in rows.items() if row.get("profile")]
    return "\n".join([*table.source(results, results["peer"]), "", *table.aligned(cells), *notes]) + "\n"


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """The median ratio of two rows' seconds in equal rounds, with its interval where there are several."""
    ratios = np.divide(theirs, ours)
    text = f"{np.median(ratios):.2f}"
    if len(ratios) == 1:
        return text
    low, high = bootstrap(lambda sample: np.median(sample, (-2, -1)), ratios[:, None])
    return f"{text} [{low:.2f}, {high:.2f}]"


def main(_: list[str]) -> None:
    print(render(run(flags.read(Settings()))))


if __name__ == "__main__":
    app.run(flags.reporting(main), flags_parser=flags.parser(Settings()))
