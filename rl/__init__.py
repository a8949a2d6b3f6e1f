"""Value-based and offline reinforcement learning in JAX: any value head in any backup and any agent.

Imports run downwards only: experiments, then train/evaluate/log/checkpoint, then agents, then dynamics,
networks and replay, then values, then types.
"""
