"""How many instructions a message costs: counted by callgrind, on a device that is none."""
