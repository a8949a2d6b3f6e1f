"""One script per paper: every figure and table of it, ours beside what was published, started as a module.

    python -m experiments.papers.<name>

Published numbers are constants here, with where they stand; nothing that a second paper could need lives here.
"""
