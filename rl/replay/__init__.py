"""Where transitions wait to be sampled, as pytrees on the device: datasets, rings, views of them.

Nothing here reads a file (that is ``rl.data``), or knows a network or a learner: `rl.buffers` makes the updates of
learners from what they remember.
"""
