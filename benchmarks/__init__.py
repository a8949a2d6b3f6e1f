"""Speed and memory on the machine at hand, beside the hardware's limit and what a user would pick instead.

Nothing here is imported by the library, and no test asserts a time: times belong to a machine, not to the code.
"""
