"""Message streams: messages of any size between two programs that use aiordma."""
