"""`make matrix`: the README's two commands, and the wheel, on fresh systems.

`debian` tests on systems that `system` makes with debootstrap, `interpreters` with each Python of
this machine, and `free_threaded` with one that is built. `table` has the results.
"""
