"""`make matrix`: the README's two commands, and the wheel, on fresh systems.

`debian` tests on systems that `system` makes with debootstrap, and `table` has the results.
"""
