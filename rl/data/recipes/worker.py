"""One simulating process: chunks of work in, one file per chunk out."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

DONE = "done"


def serve(folder: Path) -> None:
    """Make each chunk named by a line of stdin, answering each with a line: ``DONE`` or what went wrong.

    A line is JSON: the module whose ``Chunk`` it is, and the fields. Ends when stdin does, and so also when the
    parent process was killed.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(
        sys.stderr.fileno(), sys.stdout.fileno()
    )  # what a simulator prints must not be taken for an answer
    for line in sys.stdin:
        try:
            module, fields = json.loads(line)
            importlib.import_module(module).Chunk(*fields).make(folder)
            answer = DONE
        except Exception as error:
            if not isinstance(error, OSError):  # a full disk needs no traceback
                traceback.print_exc()
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, file=answers, flush=True)
