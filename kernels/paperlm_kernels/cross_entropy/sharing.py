"""How the programs of `products_kernel` share two kinds of units so that all end together, without a queue.

The first kind is dealt out in turns. Its units are long and few, so that afterwards some programs have done more tiles
than others; those begin with the second kind, the short units, so many turns later. Who does what is known from the
lengths alone: the same in every run, and no program waits for another.
"""

import triton
import triton.language as tl

MOST_PROGRAMS = tl.constexpr(256)
# tiles that take as long as a unit takes to start and to store its result
UNIT_COST = tl.constexpr(2)
# turns over which the mean length of the short units is taken
TURNS_AHEAD = tl.constexpr(8)


@triton.jit
def delays(load, length, programs):
    """Turns by which each program begins later with units of `length` tiles, given the tiles `load` that it has done.

    Returns (MOST_PROGRAMS,) of all programs, this program's, and the largest.
    """
    q = tl.arange(0, MOST_PROGRAMS)
    least = tl.min(tl.where(q < programs, load, 2147483647), 0)
    delay = tl.where(q < programs, (load - least + length // 2) // tl.maximum(length, 1), 0)
    return delay, tl.sum(tl.where(q == tl.program_id(0), delay, 0), 0), tl.max(delay, 0)


@triton.jit
def unit_of_turn(turn, done, units, delay, own_delay, longest, programs):
    """This program's unit of a turn (`units`: none) if `done` were given out in earlier ones, and how many after it."""
    program = tl.program_id(0)
    begun = programs
    before = program
    if turn < longest:
        q = tl.arange(0, MOST_PROGRAMS)
        there = ((q < programs) & (delay <= turn)).to(tl.int32)
        begun = tl.sum(there, 0)
        before = tl.sum(tl.where(q < program, there, 0), 0)
    unit = tl.where(own_delay <= turn, done + before, units)
    return tl.minimum(unit, units), done + begun
