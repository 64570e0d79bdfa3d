"""What `aiordma ping` does: messages that come back, and what they tell of the way there.

Its modules are imported one by one: the command line needs only the limits.
"""
