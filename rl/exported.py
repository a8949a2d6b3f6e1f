"""A trained agent of language models as a folder: its policy as transformers reads it, its values, and a card.

The folder holds what `rl.language.huggingface` writes of the policy, ``values.safetensors``, all else that values or
chooses tokens, ``values.json``, the agent's settings, and README.md, which says so to people. Optimisers are not in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl import checkpoint
from rl.agents import bcoder, ilql, lm_bc
from rl.language import generate, huggingface, model, pretrained
from rl.language.generate import Decoder
from rl.language.model import LM
from rl.language.pretrained import Pretrained
from rl.language.tokenizer import continuation
from rl.language.weights import WeightsError
from rl.log import read_json, replacing, write_json
from rl.types import Params, State, TokenBatch
from rl.values import heads
from rl.values.heads import HeadSettings, ValueHead
from rl.values.tokens import TokenValues

AGENTS: Mapping[str, ModuleType] = MappingProxyType({"bcoder": bcoder, "ilql": ilql, "lm_bc": lm_bc})
CARD, VALUES = "values.json", "values.safetensors"
# What values or chooses tokens, beside the policy: names in a state's parameters and in its target networks.
_KEPT = {
    "bcoder": (("residual", "value"), ("residual",)),
    "ilql": (("trunk", "v"), ("trunk", "q")),
    "lm_bc": ((), ()),
}


class Exported(NamedTuple):
    """A trained agent as it was read."""

    agent: str
    config: Any  # its hyper-parameters
    head: ValueHead
    language_model: Pretrained  # the policy and its tokenizer
    stop: str  # the token that ends an answer
    lm: LM
    state: State  # parameters and target networks; it cannot be trained on
    decoder: Decoder  # what it says, steered by its values if it is ILQL, for `rl.language.generate`
    params: Params  # of `decoder`
    # Scores, Q and V of texts, as the agent's own `token_values`; None: no values
    token_values: Callable[[State, TokenBatch], TokenValues] | None


def save(
    folder: str | os.PathLike[str],
    agent: str,
    config: Any,
    head: HeadSettings,
    language_model: Pretrained,
    state: State,
    *,
    stop: str,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes the folder; files of the same names there are replaced. If that is interrupted, `load` refuses the folder.

    Args:
      folder: made if missing.
      agent: one of `AGENTS`.
      config: its hyper-parameters.
      head: of its values.
      language_model: the one that it was made from.
      state: what it learned.
      stop: the token that ends an answer.
      about: JSON; what else the card says.

    Raises:
      WeightsError: no family of transformers can hold the architecture; nothing is written.
    """
    folder = Path(folder)
    parts = jax.device_get(_parts(agent, state))
    policy = jax.device_get(state.params["policy"])
    huggingface.describe(language_model.config)  # which raises while an older export is still whole
    folder.mkdir(parents=True, exist_ok=True)
    # A card of no agent, until all is there: without any, the folder would be a language model without values.
    write_json(folder / CARD, {})
    huggingface.save(
        folder,
        language_model.config,
        policy,
        language_model.tokenizer,
        language_model.ends,
        language_model.companions,
    )
    huggingface.write_safetensors(
        folder / VALUES, {name: np.asarray(leaf) for name, leaf in checkpoint.named(parts).items()}
    )
    card = {
        "agent": agent,
        "config": dataclasses.asdict(config),
        "head": head._asdict(),
        "stop": stop,
        **about,
        "sha256": _digests(folder),
    }
    with replacing(folder / "README.md") as partial:
        partial.write_text(_readme(agent, card) + _end(language_model, stop), encoding="utf-8")
    write_json(folder / CARD, card)


def load(folder: str | os.PathLike[str], dtype: Any = jnp.float32) -> Exported:
    """Reads what `save` wrote, to the same logits and values.

    Args:
      folder: what `save` wrote.
      dtype: what the model computes in.

    Raises:
      FileNotFoundError: part of the folder is missing.
      WeightsError: a file is damaged, or they do not belong together, as after a `save` that was interrupted; the
        message names it.
      ImportError: the package tokenizers is missing.
    """
    path = Path(folder) / CARD
    if not path.exists():
        raise FileNotFoundError(f"no {CARD} in {folder}: give a folder that --export wrote")
    policy = pretrained.load(folder)
    try:
        card = read_json(path)
        agent = card["agent"]
        module, config = AGENTS[agent], _config(AGENTS[agent].Config, card["config"])
        head, stop = heads.make(*HeadSettings(**card["head"])), card["stop"]
        if not isinstance(stop, str):
            raise TypeError(f"the token that ends an answer is {stop!r}")
        lm = model.make(policy.config, dtype)
        like = jax.eval_shape(module.make(config, lm, head).init, jax.random.key(0), None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} describes no agent ({error!r}): export it again") from error
    parts = _values(Path(folder) / VALUES, _parts(agent, like))
    _check_digests(Path(folder), card.get("sha256"))
    state = State({"policy": policy.params, **parts["params"]}, parts["target"], {}, np.zeros((), np.int32))
    state = jax.tree.map(jnp.asarray, state)
    choose, of_state = decoder(agent, config, lm, head)
    token_values = module.token_values(config, lm, head)
    return Exported(agent, config, head, policy, stop, lm, state, choose, of_state(state), token_values)


def decoder(agent: str, config: Any, lm: LM, head: ValueHead) -> tuple[Decoder, Callable[[State], Params]]:
    """What an agent says, and what it takes of a state: its policy, which ILQL's values steer."""
    if agent == "ilql":
        return ilql.decoder(config, lm, head), ilql.decoder_params
    return generate.decoder(lm), lambda state: state.params["policy"]


def _config(kind: Any, stored: Mapping[str, Any]) -> Any:
    """Hyper-parameters of a card, dataclasses within them too; those that it lacks have their defaults."""
    usual = kind()
    nested = {
        name: type(getattr(usual, name))(**value)
        for name, value in stored.items()
        if dataclasses.is_dataclass(getattr(usual, name, None))
    }
    return kind(**{**stored, **nested})


def _parts(agent: str, state: State) -> dict[str, Any]:
    params, target = _KEPT[agent]
    return {
        "params": {name: state.params[name] for name in params},
        "target": {name: state.target[name] for name in target},
    }


def _values(path: Path, like: Any) -> Any:
    """The arrays of a file in the structure of ``like``, or an error that names those that are wrong."""
    if not path.exists():
        raise FileNotFoundError(f"no {path.name} in {path.parent}: export the agent again")
    wanted, tensors = checkpoint.named(like), huggingface.read_safetensors(path)
    wrong = sorted(wanted.keys() ^ tensors.keys())
    wrong += [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
    wrong += [name for name in wanted.keys() & tensors.keys() if not np.isfinite(tensors[name]).all()]
    if wrong:
        raise WeightsError(
            f"{path}: tensors that are missing, left over, of another shape or not finite: {', '.join(wrong[:8])}; "
            "export the agent again"
        )
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in wanted])


def _digests(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of the files of weights that are there."""
    digests = {}
    for name in (huggingface.WEIGHTS, VALUES):
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _check_digests(folder: Path, stored: Any) -> None:
    """Raises WeightsError if the weights are not those of the card; older cards do not say whose they are."""
    if stored is not None and stored != _digests(folder):
        raise WeightsError(
            f"{folder}: {huggingface.WEIGHTS} and {VALUES} do not belong to {CARD}: one of them was changed since they "
            "were written; export the agent again"
        )


def _end(language_model: Pretrained, stop: str) -> str:
    """What the card tells users of transformers whose ``generate`` would not stop where an answer ends."""
    [end] = continuation(language_model.tokenizer, stop)
    if end in language_model.ends:
        return ""
    return (
        f"\nAn answer ends with the token {json.dumps(stop)}, which does not end the model's texts. In transformers:\n"
        f"`model.generate(..., eos_token_id={[*language_model.ends, end]})`.\n"
    )


def _readme(agent: str, card: Mapping[str, Any]) -> str:
    says = {
        "ilql": "what the log says (pi_beta). Its values steer it: log pi_beta + beta min Q",
        "bcoder": "B-Coder's policy, whose logits are Q / alpha",
        "lm_bc": "fine-tuned by likelihood, without values",
    }[agent]
    return "\n".join(
        [
            "---",
            "pipeline_tag: text-generation",
            "tags: [reinforcement-learning, offline-rl]",
            "---",
            "",
            f"# A language model trained by `{agent}`",
            "",
            f"`model.safetensors` is a language model that transformers loads: {says}.",
            f"`{VALUES}` holds what values and chooses tokens beside it, `{CARD}` the settings.",
            "All of it is read by one call:",
            "",
            "```python",
            "from rl import exported",
            "",
            'agent = exported.load("this folder")  # agent.decoder says something, agent.token_values values texts',
            "```",
            "",
            "Text: `python -m experiments.language --model=FOLDER --generate=prompts.jsonl`.",
            "",
            "```json",
            json.dumps(card, indent=2, default=float),
            "```",
            "",
        ]
    )
