"""A campaign: programs that a seed decides, on simulated devices that the same seed decides.

A program connects, sends, receives, reads, writes, uses byte streams or datagrams, cancels, closes
and aborts. The seed also draws the order of all events, and which calls fail or end late. At the
end of each program:

- bytes have arrived as they were sent, in order, and no message twice;
- memory that was given back was not used any more;
- every await has ended, with a result or a typed error;
- nothing is left: no C object, no task, no job, and no credit is lost.

    PYTHONPATH=tests python -m simulator.campaign SEED [COUNT] [--stop]

runs COUNT programs from SEED on, on all processors, and prints the seeds that fail.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter

from simulator.any_size import AnySize
from simulator.messages import Messages
from simulator.program import FALLIBLE, Program
from simulator.scenarios import Connects, Datagrams, Streams

# isort: split
from progress import INTERVAL, in_words, seconds_left

REPLAY = f"PYTHONPATH=tests {os.path.relpath(sys.executable)} -m simulator.campaign"
LIMIT = 120.0
"""Seconds of real time for one program. Most take a fraction of a second."""
PROGRAMS = (*(Messages,) * 4, *(AnySize,) * 4, *(Streams,) * 3, Connects, *(Datagrams,) * 2)
"""The programs, each as often as it is drawn."""


def make(seed: int) -> Program:
    """Return the program of a seed."""
    chance = random.Random(seed)
    return chance.choice(PROGRAMS)(seed, chance)


def run_in_child(seed: int) -> tuple[int, Counter[str], str]:
    """Run the program of a seed in a forked process, so that no seed depends on another.

    Return the seed, its figures, and its failure or "". A program that takes longer than LIMIT
    seconds of real time has failed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        failure, figures = "", Counter[str]()
        try:
            program = make(seed)
            program.run()
            figures = program.figures
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump([figures, failure], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return seed, Counter(), f"the process of the program has ended with status {status}"
    figures, failure = json.loads(text)
    return seed, Counter(figures), failure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulator.campaign")
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="the number of programs")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-fork", action="store_true", help="run all in this process, and stop")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    if options.no_fork:  # a forked process would not store the coverage of C
        for seed in seeds:
            make(seed).run()
        return
    failed: list[int] = []
    total: Counter[str] = Counter()
    began = printed = time.monotonic()
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, len(seeds))) as pool:
        results = pool.imap_unordered(run_in_child, seeds)
        for done, (seed, figures, failure) in enumerate(results, 1):
            total += figures
            if failure:
                failed.append(seed)
                print(f"{failure}seed {seed} has failed. Replay it: {REPLAY} {seed}", flush=True)
                if options.stop:
                    break
            if time.monotonic() - printed > INTERVAL:
                printed = time.monotonic()
                left = in_words(seconds_left(printed - began, done, len(seeds)))
                print(
                    f"{done} of {len(seeds)} seeds, {len(failed)} failed, {left} left", flush=True
                )
    took = in_words(time.monotonic() - began)
    print(f"{done} seeds in {took}, {len(failed)} failed: {sorted(failed)}")
    print(dict(sorted(total.items())))
    print(f"never failed: {[name for name in FALLIBLE if not total[f'failed {name}']]}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
