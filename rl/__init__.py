"""Value-based and offline reinforcement learning in JAX: any value head in any backup and any agent.

Imports run downwards only, and within a line in no circle:

    experiments
    what trains, evaluates and exports: shard, and the modules that are not named below
    agents, dynamics
    language, data
    envs
    networks, replay, values, programs
    acting, checkpoint, extras, files, keys, linalg, log, machine, masks, nest, settings, statistics
    types
"""
