"""Programs of a sweep as tasks of a Ray cluster that is running.

    ray start --head                                        (on one machine; `ray start --address=HOST:6379` on others)
    python -m sweeps.run sweeps/heads_pointmaze.yaml --engine=ray --gpus=1

Ray says what runs where and when. All else is in the run folders, as without it, so that all machines must see them
under the same path, and have the same code. A task whose worker is killed is started again, and goes on from the newest
checkpoint. Ray ends the tasks of a driver that is killed; the same command goes on, and waits for a folder that another
process still has open.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rl import locks, shard, train
from sweeps import records, training
from sweeps.layout import Program

RETRIES = 10  # of a task whose worker died
PAUSE = 5.0  # seconds until a folder that another process has open is looked at again
LONGEST = 60 * PAUSE  # seconds until what no process has open is tried again: one makes its data, say
# What a task may say, with its rows or a message.
ROWS, IN_USE, OVER, METRIC, LOST = "rows", "in_use", "over", "metric", "lost"
# Environment variables that tasks get from this process; the last two say where data lie.
_PASSED = ("HEADWAY_", "JAX_", "XLA_", "MUJOCO_", "D4RL_", "MINARI_")


def outcomes(
    ray: ModuleType,
    programs: Mapping[Path, Program],
    metric: str,
    began: float,
    cpus: float,
    gpus: float,
    deadline: float,
) -> Iterator[tuple[Path, str, Any]]:
    """Submits all programs; yields the folder of each when it ends, and what became of it.

    That is `ROWS` and these; `OVER`, of one that the deadline stopped, or that another process still has open then;
    `METRIC` and a message, if the sweep's metric is not logged; or `LOST` and a message, if its workers died again and
    again.

    Args:
      ray: of `connect`; it is shut down in the end.
      programs: by their folders.
      metric: of the sweep.
      began: as of `sweeps.layout.Sweep`.
      cpus, gpus: of each task.
      deadline: when tasks stop, at the end of an epoch, by `time.time`.
    """
    say = functools.cache(print)  # what is tried again is not said again
    running: dict[Any, Path] = {}
    waiting = dict.fromkeys(programs, 0.0)  # {folder: when to submit it}
    pauses: dict[Path, float] = collections.defaultdict(lambda: PAUSE)
    try:
        _warn_of_resources(ray, cpus, gpus)
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, max_retries=RETRIES)(work)
        while running or waiting:
            for place in [place for place, due in waiting.items() if due <= time.time()]:
                if waiting.pop(place) and records.holder(programs[place], place):
                    if time.time() >= deadline:
                        yield place, OVER, None
                    else:
                        waiting[place] = time.time() + PAUSE
                    continue
                fields = dataclasses.asdict(programs[place])
                arguments = fields, str(place), metric, began, deadline, os.getcwd()
                running[remote.options(name=place.name).remote(*arguments)] = place
            if not running:
                time.sleep(PAUSE)
                continue
            for reference in ray.wait(list(running), timeout=PAUSE)[0]:
                place = running.pop(reference)
                kind, answer = _result(ray, reference)
                if kind == IN_USE:
                    say(f"waits for another process: {answer}", file=sys.stderr)
                    waiting[place] = time.time() + pauses[place]
                    pauses[place] = min(2 * pauses[place], LONGEST)
                else:
                    yield place, kind, answer
    except KeyboardInterrupt:
        for reference in running:
            ray.cancel(reference)  # the epoch ends with a checkpoint
        if running:
            ray.wait(list(running), num_returns=len(running))
        raise
    finally:
        ray.shutdown()


def work(
    fields: Mapping[str, Any], place: str, metric: str, began: float, deadline: float, cwd: str
) -> tuple[str, Any]:
    """One program, in a process of Ray's; see `outcomes`."""
    os.chdir(cwd)
    shard.forget_launcher()
    left = deadline - time.time()
    if left <= 0:
        return OVER, None
    with training.alarm(left) as over:
        try:
            judged = Program(**fields), Path(place), metric
            return ROWS, records.ended(*judged, began) or training.attempt(*judged)
        except locks.InUse as error:
            return IN_USE, str(error)
        except records.MetricError as error:
            return METRIC, str(error)
        except (train.Interrupted, KeyboardInterrupt):
            if over():
                return OVER, None
            raise


def connect(address: str) -> ModuleType:
    """Ray, connected to the cluster at an address: auto, HOST:PORT or ray://HOST:PORT.

    Raises:
      ImportError: Ray is not installed.
      ValueError: there is no such cluster; the message names the flag.
    """
    try:
        import ray
    except ImportError:
        raise ImportError("--engine=ray needs Ray: pip install -e '.[ray]' (in the clone)") from None
    remedy = "start one with `ray start --head`, or name a running one by --ray_address=HOST:PORT"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise ValueError(f"--ray_address={address}: nothing answers there ({error}); {remedy}") from None
    root = str(Path(__file__).parents[1])
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ray.init(
            address,
            runtime_env={"env_vars": {**passed, "PYTHONPATH": path}},
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray_address={address}: no cluster there ({error}); {remedy}") from None
    return ray


def _result(ray: ModuleType, reference: Any) -> tuple[str, Any]:
    """What a task says."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # a mistake in the code, which may not be one for the others
        print(error, file=sys.stderr)  # with its traceback
        return LOST, str(error).strip().splitlines()[-1]
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        return LOST, f"its worker died {RETRIES + 1} times: {str(error).splitlines()[0]}"
    except ray.exceptions.RayError as error:
        return LOST, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _warn_of_resources(ray: ModuleType, cpus: float, gpus: float) -> None:
    """Says so if no machine has what a task needs: it would wait without a word."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(machine.get("CPU", 0) >= cpus and machine.get("GPU", 0) >= gpus for machine in machines):
        have = "; ".join(f"{machine.get('CPU', 0):g} and {machine.get('GPU', 0):g}" for machine in machines)
        print(
            f"no machine of the cluster has {cpus:g} CPUs and {gpus:g} GPUs for a program (they have {have}): programs "
            "wait until one joins; --cpus and --gpus change what each asks for",
            file=sys.stderr,
        )
