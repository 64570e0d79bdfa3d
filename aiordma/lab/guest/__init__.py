"""The half of the lab that runs inside the guest.

These modules start on an emulated processor before every command, so they import only what the
interpreter has loaded anyway or what is written in C: no enum, dataclasses, typing or subprocess.
"""
