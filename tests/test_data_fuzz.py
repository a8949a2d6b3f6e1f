"""All readers on damaged files: the mutations of `fuzz_readers`, every structured one and some of bytes."""

from collections import Counter

import pytest

pytest.importorskip("h5py")

import fuzz_readers


@pytest.mark.slow
def test_no_reader_hangs_fails_unexplained_or_accepts_what_is_wrong(tmp_path):
    """Nor refuses what is right; `python -m tests.fuzz_readers --mutations=10000` asks the same of many more."""
    layouts = fuzz_readers.layouts()
    structured = sum(len(layout.wrong | layout.harmless) for layout in layouts.values())
    outcomes = list(fuzz_readers.run(structured + 100, 0, tmp_path))
    faults = [
        (index, outcome) for index, outcome in enumerate(outcomes) if outcome.kind in fuzz_readers.FAULTS
    ]
    assert not faults
    counts = Counter(outcome.kind for outcome in outcomes)
    assert counts["refused"] > 150 and counts["read"] > 20  # or the mutations would show nothing
