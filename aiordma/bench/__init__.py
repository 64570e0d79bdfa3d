"""`aiordma bench`: the library beside its peers, in one run, on one device.

A *test* asks one question of each *contender*, which is two processes, a server and a client. All
contenders take their turns in each *round*, so that ratios hold though the machine has its moods.
"""
