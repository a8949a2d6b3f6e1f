"""Causal language models: the model, its weights and tokenizer from files, and text generated with it.

Trunks are `rl.networks.transformer`'s, values of tokens `rl.values.tokens`' and `rl.networks.token_heads`', logged
dialogues `rl.replay.tokens`'. No agent, loss or optimiser is known here.
"""
