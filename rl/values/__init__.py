"""What a value is and what it should equal, as pure functions of arrays.

``heads``: how a number is represented by a network's outputs. ``bellman``: what it is regressed towards.
``losses``: everything else an agent minimises. No network, optimiser, data or device is known here.
"""
