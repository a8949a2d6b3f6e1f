"""Programs that nobody vouches for: problems with tests, and the verdict of running a program against them.

`rl.programs.problems` reads HumanEval, MBPP and files of sampled programs; `rl.programs.pool` runs programs in
sandboxed processes. Here is neither JAX nor a language model, and the sandbox's own modules (`worker`, `kernel`,
`wire`) import nothing but the standard library and each other, because they run inside it: nothing is imported here.
"""
