"""What the command line has to know of pinging; imports nothing, as the command's help does not."""

DEFAULT_PORT = 7473
DEFAULT_SIZE = 64
MAX_SIZE = 1 << 20
