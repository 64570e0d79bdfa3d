"""`aiordma doctor`: examine this machine for what RDMA needs, and say how to mend what is missing.

Nothing is imported here: the command line imports the parts when it runs.
"""
