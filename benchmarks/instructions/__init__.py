"""The instructions of one message, counted by callgrind on a device without hardware."""
