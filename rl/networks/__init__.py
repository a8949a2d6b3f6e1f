"""Function approximators behind one interface, ``Network(init, apply)``.

Flax is imported in this folder and nowhere else above it. Networks know value heads only by their size;
they know no agent, loss or optimiser.
"""
