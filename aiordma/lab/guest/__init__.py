"""The part of the lab that runs in the guest.

These modules are loaded before every command, on an emulated processor. So they import only modules
that the interpreter has loaded already or that are written in C: no enum, dataclasses, typing or
subprocess.
"""
