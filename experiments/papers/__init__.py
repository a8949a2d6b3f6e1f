"""One script per paper: every figure and table of it, ours beside what was published, started as a module.

    python -m experiments.papers.<name>

Published numbers are data, in ``published/*.yaml``, with where they stand. What every study does is in
`experiments.studies`, and nothing else that a second paper could need lives here.
"""
