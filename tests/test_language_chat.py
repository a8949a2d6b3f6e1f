"""rl.language.chat: the tokens and the answers that transformers finds, what is paid where, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

import tokenizers as package

from rl.envs.text import Chat
from rl.language import chat, huggingface, speak
from rl.language.speak import Words
from rl.language.weights import WeightsError

NAMED = "<|begin|>", "<|end|>", "<|stop|>"
BEGIN, END, STOP = range(3)

# As ChatML: a line says who speaks, a token that the turn is over, and who does not say anything gets instructions.
CHATML = """
{%- if messages[0]['role'] != 'system' %}<|begin|>system
Be brief.<|end|>
{% endif %}
{%- for message in messages %}
<|begin|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}

{% else %}{{ message['content'] + '<|end|>' }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
{% endif %}"""

# As Llama's: a first token, the day, tools as JSON, texts without the space around them, roles that take turns.
TRIMMED = """{{- bos_token }}{% set ns = namespace(last='') %}
{%- if tools is not none %}Tools: {{ tools | tojson(indent=2) }} & {% endif %}Today is {{ strftime_now('%d %b %Y') }}.
{%- for message in messages %}
    {%- if message.role == ns.last %}{{ raise_exception('The roles must take turns: ' ~ message.role) }}{% endif %}
    {%- set ns.last = message.role %}
    {%- if not message.content %}{% continue %}{% endif %}
    {{- '[' + message.role + ']\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ message.content | trim + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n\\n' }}{% endif %}"""

# As models that reason: what was thought before the last question is not written any more.
FORGETFUL = """
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|begin|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if loop.index0 > ns.asked %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
{% endif %}"""

MARKED_ALONE = "{{ message['content'] }}{% endgeneration %}{{ '<|end|>' }}"

TEMPLATES = {"chatml": CHATML, "trimmed": TRIMMED, "forgetful": FORGETFUL}
MESSAGES = (
    {"role": "user", "content": "Naïve  <b>question</b>?\n"},
    {"role": "assistant", "content": " \n\nYes: 2+2 = 4 ☃ ", "reasoning_content": "two and two"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": "", "reasoning_content": "nothing"},
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "Nine", "reasoning_content": "three times"},
)
TOOLS = ({"type": "function", "function": {"name": "add", "description": "a & b"}},)
DAY = datetime(2026, 1, 31)


def unmarked(template: str) -> str:
    """The same without saying what the assistant's is."""
    return template.replace("endgeneration", "endif").replace("generation %}", "if true %}")


def tokenizer() -> Any:
    """Bytes, a few pairs of them that cross the borders of messages, and three special tokens."""
    letters = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*NAMED, *letters])}
    merges = [("Ċ", "Ċ"), ("Ċ", "Y"), ("a", "s"), ("Ġ", "Ġ"), ("ċ", "Ċ")]
    merges = [(one, other) for one, other in merges if one in vocabulary and other in vocabulary]
    vocabulary |= {one + other: len(vocabulary) + number for number, (one, other) in enumerate(merges)}
    bpe = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = package.decoders.ByteLevel()
    bpe.add_special_tokens(list(NAMED))
    bpe.post_processor = package.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[(NAMED[BEGIN], BEGIN)]
    )
    return bpe


def companions(template: Any, **others: Any) -> dict[str, str]:
    end = {"__type": "AddedToken", "content": NAMED[END], "special": True}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": NAMED[BEGIN],
        "chat_template": template,
    }
    return {"tokenizer_config.json": json.dumps(described | {"eos_token": end} | others)}


def read(template: Any, **others: Any) -> Words:
    return speak.make(tokenizer(), NAMED[STOP], [END], chat.read(companions(template, **others), DAY))


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of templates that mark the answers and, by their prompts, of those that do not."""
    transformers = pytest.importorskip("transformers")
    messages = MESSAGES[:2] + MESSAGES[4:] if name == "trimmed" else MESSAGES
    messages = ({"role": "system", "content": "Calculate."}, *messages) if name == "forgetful" else messages
    for file, text in companions(TEMPLATES[name]).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    today = datetime.now()
    for tools in ((), TOOLS):
        expected = theirs.apply_chat_template(
            list(messages), tools=list(tools) or None, return_dict=True, return_assistant_tokens_mask=True
        )
        conversation = Chat(messages, tools=tools)
        for template in (TEMPLATES[name], unmarked(TEMPLATES[name])):
            words = speak.make(tokenizer(), NAMED[STOP], [END], chat.read(companions(template), today))
            one = speak.episode(words, conversation)
            assert one.tokens.tolist() == expected["input_ids"]
            assert one.is_action.tolist() == [bool(mask) for mask in expected["assistant_masks"]]
            prompt = theirs.apply_chat_template(
                list(messages[:-1]), tools=list(tools) or None, add_generation_prompt=True, return_dict=True
            )
            assert speak.history(words, conversation._replace(messages=messages[:-1])) == prompt["input_ids"]


def test_answers_are_paid_on_their_last_token_and_asked_as_they_were_learned() -> None:
    words = read(unmarked(CHATML))
    answer = {"role": "assistant", "content": "Six<|end|> or so"}  # a model would stop there
    conversation = Chat((*MESSAGES[:3], answer), (0.0, 0.5, 0.0, -1.0), False, 0.25)
    one = speak.episode(words, conversation)
    text = words.tokenizer.decode(one.tokens.tolist(), skip_special_tokens=False)
    begin = "<|begin|>system\nBe brief.<|end|>\n<|begin|>user\nNaïve"
    assert text.startswith(begin) and text.endswith("<|begin|>assistant\nSix<|end|> or so<|end|>\n")
    for reward, expected in ((0.5, " \n\nYes: 2+2 = 4 ☃ <|end|>"), (-1.0, "Six<|end|>")):
        [last] = np.flatnonzero(one.reward == reward)
        first = last - one.is_action[last::-1].argmin() + 1
        said_there = words.tokenizer.decode(one.tokens[first : last + 1].tolist(), skip_special_tokens=False)
        assert said_there == expected
    assert (one.terminated, one.imitate) == (False, 0.25)
    prompt = speak.history(words, conversation._replace(messages=conversation.messages[:3]))
    assert prompt == one.tokens[: len(prompt)].tolist() and one.is_action[len(prompt)]
    assert one.is_action[: len(prompt)].sum() == (one.reward == 0.5).argmax() + 1 - one.is_action.argmax()
    asked = conversation._replace(messages=conversation.messages[:3], rewards=conversation.rewards[:3])
    again = speak.episode(words, speak.answered(asked, answer["content"]))  # an answer that earns nothing
    np.testing.assert_array_equal(again.tokens, one.tokens)
    np.testing.assert_array_equal(again.reward, np.maximum(one.reward, 0))


@pytest.mark.parametrize("content", ["Yes", "Yes ☃", "☃"])
def test_an_answer_that_is_marked_without_its_end_has_all_bytes_of_its_last_character(content: str) -> None:
    """A byte-level tokenizer may have several tokens for it."""
    words = read(CHATML.replace("{{ message['content'] + '<|end|>' }}{% endgeneration %}", MARKED_ALONE))
    one = speak.episode(words, Chat((MESSAGES[0], {"role": "assistant", "content": content}), (0.0, 1.0)))
    assert words.tokenizer.decode(one.tokens[one.is_action].tolist()).removeprefix("\n") == content
    [last] = np.flatnonzero(one.reward)
    assert one.tokens[last + 1] == END


def test_an_answer_that_ends_in_a_space_ends_there_where_offsets_are_trimmed() -> None:
    """Spaces are no part of any token then: all that follows counted as said."""
    bpe = tokenizer()
    bpe.post_processor = package.processors.ByteLevel(trim_offsets=True)
    template = CHATML.replace("{{ message['content'] + '<|end|>' }}{% endgeneration %}", MARKED_ALONE)
    words = speak.make(bpe, NAMED[STOP], [END], chat.read(companions(template), DAY))
    one = speak.episode(words, Chat((MESSAGES[0], {"role": "assistant", "content": "Yes "}), (0.0, 1.0)))
    chosen = one.tokens[one.is_action].tolist()
    assert bpe.decode(chosen).strip() == "Yes" and END not in chosen


def test_what_is_too_long_is_cut_at_the_front_behind_the_first_token() -> None:
    words = read(TRIMMED)
    conversation = Chat(MESSAGES[:2], (0.0, 1.0))
    whole = speak.episode(words, conversation)
    room = int(whole.is_action.sum()) - 3
    one = speak.shortened(words, conversation, whole, room)
    assert one.tokens.tolist() == [BEGIN, *whole.tokens[1 - room :].tolist()]
    assert one.is_action.tolist() == [False, *[True] * (room - 1)] and one.reward.tolist()[-1] == 1.0
    prompt = conversation._replace(messages=MESSAGES[:1])
    assert speak._fitting(words, prompt, 7) == [BEGIN, *speak.history(words, prompt)[-6:]]
    # Without one, what is left of an answer starts with a token that has nothing before it.
    words = words._replace(template=words.template._replace(first=""))
    paid = whole._replace(
        reward=np.where(np.arange(len(whole.tokens)) == len(whole.tokens) - 5, 9, whole.reward)
    )
    one = speak.shortened(words, conversation, paid, 5)
    assert one.reward.sum() == whole.reward[-4:].sum()  # a token that is no action any more earns nothing
    assert one.tokens.tolist() == whole.tokens[-5:].tolist() and one.is_action.tolist() == [
        False,
        *[True] * 4,
    ]


def test_templates_are_found_where_models_have_them() -> None:
    conversation = Chat(({"role": "user", "content": "a"},))
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "talk"}]
    for files, tools, text in (
        (companions("inside") | {"chat_template.jinja": "beside"}, (), "beside"),
        (companions(several), (), "talk"),
        (companions(several), TOOLS, "tools"),
        ({"chat_template.json": json.dumps({"chat_template": "older"})}, (), "older"),
        (
            companions("{{ eos_token }}") | {"special_tokens_map.json": '{"eos_token": "<|stop|>"}'},
            (),
            NAMED[END],
        ),
    ):
        template = chat.read(files)
        assert template and template.write(conversation.messages, tools, False) == text
    assert chat.read({}) is None and chat.read(companions(None)) is None
    assert set(huggingface.COMPANIONS) >= {
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer_config.json",
    }
    timed = "{{ strftime_now('%Y') }}"
    assert chat.read(companions(timed)).asks_the_time and not chat.read(companions(timed), DAY).asks_the_time


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (TRIMMED, MESSAGES[:1] * 2, "does not take its messages .The roles must take turns: user"),
        (
            "{{ messages[0].role.nothing.at.all }}",
            MESSAGES[:2],
            "chat template does not take its messages .*no attribute",
        ),
        ("{{ messages.append(1) }}", MESSAGES[:2], "chat template does not take its messages"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES[:2], "chat template does not take its messages"),
        ("{{ messages[-1].content }}", MESSAGES[:2], "in another way where nothing follows"),
        ("{{ messages | map(attribute='content') | join }}", MESSAGES[:2], "in message 2 has no end"),
        ("{% generation %}a{% endgeneration %}", MESSAGES[:4], "marks 1 answers, and there are 2"),
        (
            CHATML,
            ({"role": "user", "content": "\ufdd0"}, MESSAGES[1]),
            "has U.FDD0 or U.FDD1",
        ),
    ],
)
def test_chats_that_a_template_does_not_take(template: str, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speak.episode(read(template), Chat(tuple(messages)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (companions("{% for x in %}"), "chat template is damaged"),
        (companions(5), "is no template: download it again"),
        (companions([{"name": "rag"}]), "is no template: download it again"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json is no JSON"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json is no JSON"),
    ],
)
def test_damaged_templates(files: dict[str, str], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        chat.read(files)


def test_a_model_without_a_template() -> None:
    words = speak.make(tokenizer(), NAMED[END])
    for ask in (speak.episode, speak.history):
        with pytest.raises(ValueError, match=r"no chat template.*put a chat_template\.jinja into its folder"):
            ask(words, Chat(MESSAGES[:2]))
