"""Where transitions wait to be sampled, as pytrees on the device: datasets, rings, views of them.

Nothing here reads a file (that is ``rl.data``) or knows a network. `rl.replay.buffers` alone knows learners: it makes
their updates from what they remember.
"""
