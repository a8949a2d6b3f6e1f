"""Checkpoints: bit-exact, whole or not there, and never another run's."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl import checkpoint
from rl.checkpoint import CheckpointError

ROOT = Path(__file__).parent.parent
CARD = {"agent": "iql", "config": {"expectile": 0.7, "layers": (256, 256)}, "seeds": 3}


class Learned(NamedTuple):
    params: Any
    optimiser: Any
    keys: Any
    step: Any
    best: Any


def make_state(seed: int = 0, width: int = 4) -> Learned:
    key = jax.random.key(seed)
    params = {
        "actor": {"w": jax.random.normal(key, (3, width)), "b": jnp.arange(width).astype(jnp.bfloat16) / 3},
        "flags": (jnp.array([True, False]), jnp.zeros((0, 2))),
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    opt_state = optimiser.init(params["actor"])
    for _ in range(2):  # so that the moments and the count are not zeros
        _, opt_state = optimiser.update(params["actor"], opt_state)
    best = np.array([np.nan, -np.inf, 1 / 3])  # float64: a host-side record, kept out of JAX
    return Learned(params, opt_state, jax.random.split(key, 3), jnp.int32(7 + seed), best)


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    kind = str(leaf.dtype)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return kind, leaf.shape, np.asarray(leaf).tobytes()


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b), path
        assert bits(a) == bits(b), path


def abstract(tree: Any) -> Any:
    def shape(leaf):
        return leaf if isinstance(leaf, np.ndarray) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, tree)


def steps_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


# Round trip.


def test_nothing_there_is_none(folder: Path):
    assert checkpoint.restore(folder, make_state(), CARD) is None
    folder.mkdir()
    assert checkpoint.restore(folder, make_state(), CARD) is None


@pytest.mark.parametrize("like", [make_state, lambda: abstract(make_state())], ids=["arrays", "shapes"])
def test_round_trip_is_bitwise(folder: Path, like):
    state = make_state(seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(folder, 300, state, CARD)
        restored, step = checkpoint.restore(folder, like(), CARD)
    assert step == 300
    assert_same_bits(restored, state)


def test_a_single_array_and_another_key_implementation(folder: Path):
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 2)
    checkpoint.save(folder, 1, keys, {})
    restored, _ = checkpoint.restore(folder, keys, {})
    assert_same_bits(restored, keys)
    with pytest.raises(CheckpointError, match=r"key<rbg>\[2\]"):
        checkpoint.restore(folder, jax.random.split(jax.random.key(1), 2), {})


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_are_read_without_knowing_what_was_saved(folder: Path, implementation: str):
    state = {"keys": jax.random.split(jax.random.key(1, impl=implementation), 2), "x": np.arange(3)}
    checkpoint.save(folder, 1, state, {})
    assert_same_bits(checkpoint.read(folder)[1], state)
    assert_same_bits(checkpoint.read(folder, ("x",))[1], {"x": state["x"]})


def test_newest_is_restored_and_the_newest_two_are_kept(folder: Path):
    for step in (20, 100, 3):  # by number, not by name or time
        checkpoint.save(folder, step, make_state(step), CARD)
    checkpoint.save(folder, 120, make_state(120), CARD)
    assert steps_in(folder) == {"100", "120"}
    restored, step = checkpoint.restore(folder, make_state(), CARD)
    assert step == 120
    assert_same_bits(restored, make_state(120))


def test_keep(folder: Path):
    for step in range(5):
        checkpoint.save(folder, step, make_state(step), CARD, keep=3)
    assert steps_in(folder) == {"2", "3", "4"}
    checkpoint.save(folder, 5, make_state(5), CARD, keep=1)
    assert steps_in(folder) == {"5"}
    with pytest.raises(ValueError, match="keep"):
        checkpoint.save(folder, 6, make_state(6), CARD, keep=0)


def test_a_step_saved_again_is_replaced(folder: Path):
    checkpoint.save(folder, 1, make_state(1), CARD)
    checkpoint.save(folder, 1, make_state(2), CARD)
    assert_same_bits(checkpoint.restore(folder, make_state(), CARD)[0], make_state(2))


def test_other_files_in_the_folder_are_left_alone(folder: Path):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "old").mkdir()
    for step in range(3):
        checkpoint.save(folder, step, make_state(step), CARD)
    assert steps_in(folder) == {"notes.txt", "old", "1", "2"}


def test_inside_a_running_event_loop_as_in_a_notebook(folder: Path):
    async def cell():
        checkpoint.save(folder, 1, make_state(), CARD)
        return checkpoint.restore(folder, make_state(), CARD)

    assert_same_bits(asyncio.run(cell())[0], make_state())


# Damage.


def two_saved(folder: Path) -> Path:
    checkpoint.save(folder, 100, make_state(1), CARD)
    checkpoint.save(folder, 200, make_state(2), CARD)
    return folder / "200"


def largest_file(path: Path) -> Path:
    return max(
        (file for file in (path / "arrays").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
    )


def truncate(path: Path) -> None:
    os.truncate(largest_file(path), largest_file(path).stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    file = largest_file(path)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate_card(path: Path) -> None:
    os.truncate(path / "card.json", 40)


@pytest.mark.parametrize(
    "damage, says",
    [
        (truncate, "bytes"),
        (flip_a_bit, "have changed"),
        (lambda path: largest_file(path).unlink(), "missing"),
        (lambda path: (path / "card.json").unlink(), "half-written"),
        (truncate_card, "half-written"),
        (lambda path: (path / "card.json").write_text("{}"), "card.json lacks card, files, leaves, step"),
        (lambda path: shutil.rmtree(path / "arrays"), "missing"),
    ],
    ids=["truncated", "bit flipped", "file gone", "no card", "card truncated", "card empty", "arrays gone"],
)
def test_a_damaged_newest_is_skipped_and_named(folder: Path, damage, says: str):
    newest = two_saved(folder)
    damage(newest)
    with pytest.warns(UserWarning, match=says) as caught:
        restored, step = checkpoint.restore(folder, make_state(), CARD)
    assert step == 100
    assert_same_bits(restored, make_state(1))
    message = str(caught[0].message)
    assert str(newest) in message
    assert f"using {folder / '100'} instead" in message


@pytest.mark.parametrize("damage", [lambda path: (path / "card.json").unlink(), flip_a_bit])
def test_saving_after_damage_keeps_the_whole_one(folder: Path, damage):
    newest = two_saved(folder)
    damage(newest)
    checkpoint.save(folder, 300, make_state(3), CARD)
    assert steps_in(folder) == {"100", "300"}


def test_interrupted_save_is_skipped_then_cleared(folder: Path):
    newest = two_saved(folder)
    partial = folder / "300.saving"
    shutil.copytree(newest, partial)
    (partial / "card.json").unlink()
    with pytest.warns(UserWarning, match=r"300\.saving is half-written.*using .*200 instead"):
        assert checkpoint.restore(folder, make_state(), CARD)[1] == 200
    checkpoint.save(folder, 300, make_state(3), CARD)
    assert steps_in(folder) == {"200", "300"}


def test_interrupted_first_save_starts_from_the_beginning(folder: Path):
    (folder / "100.saving" / "arrays").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"100\.saving is half-written.*from the beginning"):
        assert checkpoint.restore(folder, make_state(), CARD) is None


def test_a_whole_one_that_was_not_renamed_yet_is_used(folder: Path):
    newest = two_saved(folder)
    newest.rename(folder / "200.saving")
    restored, step = checkpoint.restore(folder, make_state(), CARD)
    assert step == 200
    assert_same_bits(restored, make_state(2))
    # Nor is it lost if the same step is saved again, as by a run that is asked to stop at once, and that fails.
    shutil.rmtree(folder / "100")
    with pytest.raises(TypeError):
        checkpoint.save(folder, 200, make_state(3), CARD, notes=object())
    assert checkpoint.restore(folder, make_state(), CARD)[1] == 200
    (folder / "200").rename(folder / "200.saving")
    # Killed while it replaces one of the same step, some of which is still there: notes and arrays are of one of them.
    record = json.loads((folder / "200.saving" / "card.json").read_text())
    (folder / "200").mkdir()
    (folder / "200" / "card.json").write_text(json.dumps(record | {"notes": "replaced"}))
    assert checkpoint.described(folder, 200)["notes"] is None


def test_nothing_whole_is_an_error_not_a_fresh_start(folder: Path):
    newest = two_saved(folder)
    truncate(newest)
    truncate(folder / "100")
    with pytest.raises(CheckpointError, match=r"(?s)200 is damaged.*100 is damaged.*--overwrite"):
        checkpoint.restore(folder, make_state(), CARD)


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.Popen:
    """A process of its own, with this repository on its path and stderr in its stdout."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SAVE_FOREVER = """
import sys, jax.numpy as jnp
from rl import checkpoint
for step in range(1, 10**6):
    tree = {f"w{i}": jnp.full((64, 64), step + i / 8) for i in range(8)}
    checkpoint.save(sys.argv[1], step, tree, {"agent": "iql"})
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_kill_9_while_saving(folder: Path, seed: int):
    """Whatever was reported as saved before the kill is there after it, or the step then being saved is."""
    process = run_python(SAVE_FOREVER, str(folder))
    output = "".join(process.stdout.readline() for _ in range(3))
    time.sleep(random.Random(seed).uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)
    output += process.communicate(timeout=60)[0]
    assert output.splitlines()[:3] == ["1", "2", "3"], output
    reported = int(output.splitlines()[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # half-written or not: chance decides
        like = {f"w{i}": jnp.zeros((64, 64)) for i in range(8)}
        tree, step = checkpoint.restore(folder, like, {"agent": "iql"})
    assert reported <= step <= reported + 1
    for i in range(8):
        np.testing.assert_array_equal(tree[f"w{i}"], np.full((64, 64), step + i / 8, np.float32))


# Another run's checkpoint.


def test_another_agent_is_refused(folder: Path):
    checkpoint.save(folder, 1, make_state(), CARD)
    with pytest.raises(CheckpointError, match=r"agent: 'iql' in the checkpoint, 'cql' in this run") as error:
        checkpoint.restore(folder, make_state(), CARD | {"agent": "cql"})
    assert "--workdir (folder=)" in str(error.value)
    assert "--overwrite" in str(error.value)
    assert "seeds" not in str(error.value)  # what is equal is not listed


def test_another_config_is_refused_by_its_field(folder: Path):
    checkpoint.save(folder, 1, make_state(), CARD)
    other = CARD | {"config": {"expectile": 0.9, "temperature": 3.0}}
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(folder, make_state(), other)
    assert "config.expectile: 0.7 in the checkpoint, 0.9 in this run" in str(error.value)
    assert "config.layers: [256, 256] in the checkpoint, nothing in this run" in str(error.value)
    assert "config.temperature: nothing in the checkpoint, 3.0 in this run" in str(error.value)


def test_entries_that_the_caller_does_not_name_are_not_compared(folder: Path):
    checkpoint.save(folder, 1, make_state(), CARD)
    assert checkpoint.restore(folder, make_state(), {"agent": "iql"})[1] == 1


def test_other_versions_are_a_warning(folder: Path):
    checkpoint.save(folder, 1, make_state(), CARD | {"versions": {"jax": "0.10.2", "flax": "0.12"}})
    with pytest.warns(
        UserWarning, match=r"jax: '0\.10\.2' in the checkpoint, '0\.12\.0' in this run"
    ) as caught:
        checkpoint.restore(folder, make_state(), CARD | {"versions": {"jax": "0.12.0", "flax": "0.12"}})
    assert "flax" not in str(caught[0].message)


def test_other_shapes_are_refused_by_the_leaf(folder: Path):
    checkpoint.save(folder, 1, make_state(width=4), CARD)
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(folder, make_state(width=5), CARD)
    assert "params/actor/w: 'float32[3,4]' in the checkpoint, 'float32[3,5]' in this run" in str(error.value)
    assert "optimiser/1/0/mu/w" in str(error.value)


def test_another_dtype_or_structure_is_refused(folder: Path):
    state = make_state()
    checkpoint.save(folder, 1, state, CARD)
    with pytest.raises(
        CheckpointError, match=r"step: 'int32\[\]' in the checkpoint, 'float32\[\]' in this run"
    ):
        checkpoint.restore(folder, state._replace(step=jnp.float32(0)), CARD)
    with pytest.raises(CheckpointError, match="critic: nothing in the checkpoint"):
        checkpoint.restore(folder, state._replace(params=state.params | {"critic": jnp.ones(2)}), CARD)
    with pytest.raises(CheckpointError, match=r"keys: 'key<fry>\[3\]' in the checkpoint, nothing"):
        checkpoint.restore(folder, state._replace(keys=None), CARD)


def test_many_differences_are_counted(folder: Path):
    checkpoint.save(folder, 1, [jnp.zeros(i + 1) for i in range(20)], {})
    with pytest.raises(CheckpointError, match="and 12 more"):
        checkpoint.restore(folder, [jnp.zeros(i + 2) for i in range(20)], {})


def test_leaves_must_be_arrays_with_names_of_their_own(folder: Path):
    with pytest.raises(TypeError, match="'step' is int"):
        checkpoint.save(folder, 1, {"step": 3}, {})
    with pytest.raises(ValueError, match="'a/b'"):
        checkpoint.save(folder, 1, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {})
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.save(folder, 1, {"a": jnp.ones(1)}, {"agent": object()})
    assert not folder.exists()


# Disk full and interruption.


@pytest.mark.parametrize("where", ["_write_arrays", "_seal"])
def test_disk_full_removes_the_partial_and_keeps_the_rest(folder: Path, monkeypatch, where: str):
    two_saved(folder)
    real = getattr(checkpoint, where)

    def full(path: Path, *arguments) -> None:
        real(path, *arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, where, full)
    with pytest.raises(CheckpointError, match=r"(?s)disk full: the checkpoint of step 300 .*free some space"):
        checkpoint.save(folder, 300, make_state(3), CARD)
    assert steps_in(folder) == {"100", "200"}
    assert checkpoint.restore(folder, make_state(), CARD)[1] == 200


def test_one_of_an_earlier_step_is_saved_with_a_warning_unless_the_later_one_is_damaged(tmp_path: Path):
    for step in (300, 200):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            checkpoint.save(tmp_path, step, make_state(step), CARD)
        assert [str(w.message).partition(", too")[0] for w in seen] == [
            f"{tmp_path} holds a checkpoint of step 300"
        ] * (step == 200)
    assert checkpoint.restore(tmp_path, make_state(), CARD)[1] == 300
    next(
        path for path in (tmp_path / "300").rglob("*") if path.is_file() and path.stat().st_size
    ).write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, 250, make_state(), CARD)


def test_a_disk_that_is_really_full(tmp_path: Path, caplog):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("not permitted to mount a small file system")
    try:
        small, large = jnp.ones(10), jax.random.normal(jax.random.key(0), (10**6,))
        checkpoint.save(disk / "run", 1, small, {})
        with pytest.raises(CheckpointError, match="disk full"):
            checkpoint.save(disk / "run", 2, large, {})
        assert not caplog.records  # orbax's own tracebacks, hundreds of lines of them
        assert steps_in(disk / "run") == {"1"}
        assert_same_bits(checkpoint.restore(disk / "run", small, {})[0], small)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_ctrl_c_removes_the_partial(folder: Path, monkeypatch):
    two_saved(folder)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_seal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(folder, 300, make_state(3), CARD)
    assert steps_in(folder) == {"100", "200"}


# Devices and processes.

RESHARD = """
import sys, jax, numpy as np
from rl import checkpoint
assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
like = {
    "w": jax.ShapeDtypeStruct((16, 3), np.float32, sharding=split),
    "keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)),
    "step": jax.ShapeDtypeStruct((), np.int32, sharding=whole),
    "none": jax.ShapeDtypeStruct((0, 3), np.float32, sharding=whole),
}
like["keys"] = jax.ShapeDtypeStruct(like["keys"].shape, like["keys"].dtype, sharding=split)
tree, step = checkpoint.restore(sys.argv[1], like, {})
for name, leaf in tree.items():
    assert leaf.sharding == like[name].sharding, (name, leaf.sharding)
assert tree["w"].addressable_shards[3].data.shape == (2, 3)
checkpoint.save(sys.argv[1], step + 1, tree, {})
"""


@pytest.mark.slow
def test_one_device_to_eight_and_back(folder: Path):
    tree = {
        "w": jax.random.normal(jax.random.key(0), (16, 3)),
        "keys": jax.random.split(jax.random.key(1), 8),
        "step": jnp.int32(5),
        "none": jnp.zeros((0, 3)),
    }
    checkpoint.save(folder, 5, tree, {})
    flags = "--xla_force_host_platform_device_count=8"
    process = run_python(RESHARD, str(folder), XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    restored, step = checkpoint.restore(folder, tree, {})
    assert step == 6
    assert_same_bits(restored, tree)


TWO_PROCESSES = """
import sys, jax, numpy as np
folder, elsewhere, port, index = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
from rl import checkpoint
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
values = np.arange(8, dtype=np.float32)
tree = {
    "split": jax.make_array_from_callback((8,), split, lambda index: values[index]),
    "whole": jax.make_array_from_callback((8,), whole, lambda index: values[index]),
}
for step in (1, 2, 3):
    checkpoint.save(folder, step, tree, {"agent": "iql"})
restored, step = checkpoint.restore(folder, tree, {"agent": "iql"})
assert step == 3
for name in tree:
    for shard in restored[name].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
try:
    checkpoint.restore(folder if index == "0" else elsewhere, tree, {})
except checkpoint.CheckpointError as error:
    assert "[3, -1]" in str(error) and "all hosts share" in str(error), error
else:
    raise AssertionError("processes that see different checkpoints went on")
"""


@pytest.mark.slow
def test_two_processes(folder: Path, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        run_python(TWO_PROCESSES, str(folder), str(tmp_path / "other"), port, index, JAX_PLATFORMS="cpu")
        for index in "01"
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n\n".join(outputs)
    assert steps_in(folder) == {"2", "3"}
    restored, step = checkpoint.restore(folder, {"split": jnp.zeros(8), "whole": jnp.zeros(8)}, {})
    assert step == 3
    np.testing.assert_array_equal(restored["split"], np.arange(8))


# Parameters alone.


def test_export_and_load(tmp_path: Path):
    params = {"actor": {"dense": {"kernel": jax.random.normal(jax.random.key(0), (3, 2))}}, "n": jnp.int32(3)}
    checkpoint.export(tmp_path / "params.npz", params)
    with np.load(tmp_path / "params.npz", allow_pickle=False) as file:
        assert set(file.files) == {"actor/dense/kernel", "n"}
    loaded = checkpoint.load_params(tmp_path / "params.npz")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert [bits(leaf) for leaf in jax.tree.leaves(loaded)] == [
        bits(leaf) for leaf in jax.tree.leaves(params)
    ]
    assert os.listdir(tmp_path) == ["params.npz"]


def test_export_of_bfloat16_is_exact_in_float32(tmp_path: Path):
    values = jax.random.normal(jax.random.key(0), (100,)).astype(jnp.bfloat16)
    checkpoint.export(tmp_path / "p.npz", {"w": values})
    loaded = checkpoint.load_params(tmp_path / "p.npz")["w"]
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, np.asarray(values, np.float32))
    assert bits(jnp.asarray(loaded, jnp.bfloat16)) == bits(values)


def test_export_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch):
    checkpoint.export(tmp_path / "p.npz", {"w": jnp.ones(3)})

    def full(file, **_) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.export(tmp_path / "p.npz", {"w": jnp.zeros(3)})
    assert os.listdir(tmp_path) == ["p.npz"]
    np.testing.assert_array_equal(checkpoint.load_params(tmp_path / "p.npz")["w"], np.ones(3))


def test_export_refuses_names_it_could_not_read_back(tmp_path: Path):
    with pytest.raises(ValueError, match="'a/b'"):
        checkpoint.export(tmp_path / "p.npz", {"a/b": jnp.ones(1)})
    with pytest.raises(ValueError, match="names"):
        checkpoint.export(tmp_path / "p.npz", jnp.ones(1))


def test_load_params_refuses_pickles_and_damage(tmp_path: Path):
    path = tmp_path / "p.npz"
    with pytest.raises(FileNotFoundError):
        checkpoint.load_params(path)
    np.savez(path, w=np.array([{"code": 1}], dtype=object))
    with pytest.raises(CheckpointError, match=r"p\.npz.*export it again"):
        checkpoint.load_params(path)
    checkpoint.export(path, {"w": jnp.arange(1000.0)})
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match=r"p\.npz.*damaged"):
        checkpoint.load_params(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"p\.npz.*damaged"):
        checkpoint.load_params(path)


def test_the_card_can_be_read_by_anyone(folder: Path):
    checkpoint.save(folder, 3, make_state(), CARD)
    card = json.loads((folder / "3" / "card.json").read_text())
    assert card["step"] == 3
    assert card["card"]["config"] == {"expectile": 0.7, "layers": [256, 256]}
    assert card["leaves"]["params/actor/b"] == "bfloat16[4]"


@pytest.mark.slow
def test_importing_does_not_import_orbax():
    code = "import sys, rl.checkpoint; assert not [m for m in sys.modules if m.startswith('orbax')]"
    process = run_python(code)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
