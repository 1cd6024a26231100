"""How the programs of `products_kernel` share two kinds of units so that all end together, without a queue.

The units of one kind, of which there are fewer and mostly longer ones, are dealt out in turns, which leaves some
programs with more tiles than others; those join in later when the units of the other kind are dealt out. Who does what
is known from the lengths alone: the same in every run, and no program waits for another.
"""

import triton
import triton.language as tl

MOST_PROGRAMS = tl.constexpr(256)
# tiles that take as long as a unit takes to start and to store its result; part of its length
UNIT_COST = tl.constexpr(2)
# turns of dC over which the mean length of its units is taken: those in which programs join in
TURNS_AHEAD = tl.constexpr(8)


@triton.jit
def delays(load, length, programs):
    """Turns in which each program is left out when units of `length` tiles are dealt out, given the tiles `load` that
    it has from the other kind.

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
