"""Claims: what a paper says, as an expression over cells, judged on what was measured.

`language` reads an expression into a `formula`, `decide` decides each of its comparisons alone, `judge` joins them into
a verdict, in parts; `paired` compares two cells on the same items, beside the verdict.
"""

from paperlm.tables.claims.formula import Key as Key
from paperlm.tables.claims.formula import Point as Point
from paperlm.tables.claims.functions import rank_correlation as rank_correlation
from paperlm.tables.claims.judge import Verdict as Verdict
from paperlm.tables.claims.judge import judge as judge
from paperlm.tables.claims.judge import parts_of as parts_of
from paperlm.tables.claims.language import read as read
from paperlm.tables.claims.paired import PairedGap as PairedGap
from paperlm.tables.claims.paired import paired_gap as paired_gap
from paperlm.tables.claims.samples import CellSamples as CellSamples
from paperlm.tables.claims.samples import PrintedCell as PrintedCell
