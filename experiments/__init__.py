"""Thin scripts: one per kind of run, started as ``python -m experiments.<name>``, with absl flags and ``--help``.

A script parses flags, calls the library and prints; nothing that another script could need may live here.
"""
