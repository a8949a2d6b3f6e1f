"""Which kernels and copies a program runs on a GPU, and how long that is idle between them, by JAX's own profiler."""

from __future__ import annotations

import collections
import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

MOST = 20  # kernels that are listed by name
_WIDTH = 80  # letters of a name


def profile(call: Callable[[], Any], updates: int) -> dict[str, Any] | None:
    """What one ``call`` of a compiled program runs on the GPU, per update; None where its trace names no kernel.

    Args:
      call: it is done when it returns; compiled before, and called once more here.
      updates: in a call.
    """
    if jax.default_backend() != "gpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder):
                call()
        except RuntimeError as error:  # no such library, or no permission: what was timed is worth more
            print(f"no profile: {error}", file=sys.stderr)
            return None
        traces = sorted(Path(folder).rglob("*.trace.json.gz"))
        events = [
            event
            for path in traces
            for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ]
    return summary(events, updates)


def summary(events: Sequence[Mapping[str, Any]], updates: int) -> dict[str, Any] | None:
    """The kernels and copies among the ``events`` of a trace (Chrome's format), per update; None if there are none.

    Returns:
      ``kernels``, a number; ``busy_microseconds``, the sum of their times, in which kernels that run at once count
      each; ``span_microseconds``, from the first to the last; ``longest``, the most costly by name with
      ``calls`` and ``microseconds``.
    """
    process = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    thread = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    ran = [
        event
        for event in events
        if event.get("ph") == "X"
        and process.get(event["pid"], "").startswith("/device:")
        and "Stream" in thread.get((event["pid"], event["tid"]), "")
    ]
    if not ran:
        return None
    calls, time = collections.Counter[str](), collections.Counter[str]()
    for event in ran:
        name = event["name"][:_WIDTH]
        calls[name] += 1
        time[name] += event["dur"]
    first, last = min(event["ts"] for event in ran), max(event["ts"] + event["dur"] for event in ran)
    return {
        "kernels": len(ran) / updates,
        "busy_microseconds": sum(time.values()) / updates,
        "span_microseconds": (last - first) / updates,
        "longest": [
            {"name": name, "calls": calls[name] / updates, "microseconds": total / updates}
            for name, total in time.most_common(MOST)
        ],
    }


def text(profile: Mapping[str, Any]) -> str:
    """A sentence of it."""
    longest = profile["longest"][0]
    return (
        f"{profile['kernels']:.0f} kernels and copies per update, {profile['busy_microseconds']:.0f} microseconds in "
        f"{profile['span_microseconds']:.0f}, of which {longest['name']} takes {longest['microseconds']:.0f}"
    )
