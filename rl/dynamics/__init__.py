"""World models: what the next observation and the reward will be, learned from logged steps.

A model is fitted before the agent (or between its epochs) and then is a pytree that compiled code reads. Models
know networks, datasets and optimisers; they know no agent, device or environment, and values only as functions that
they are given.
"""
