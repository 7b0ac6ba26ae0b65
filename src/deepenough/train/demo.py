"""What the demo records beyond its commands: how far the tokens of one program still move."""

from __future__ import annotations

from deepenough.data.programs import Program
from deepenough.runs import RunFolder
from deepenough.settings import resolve
from deepenough.train.lazy_look import TOKENS, LazyPlot, look_at_pair
from deepenough.train.lazy_use import keep_record, load_translator
from deepenough.train.programs import ProgramTraining, held_out_programs


def look_at_program(run: str) -> Program:
    """Look at the longest held-out program as at a pair of sentences; recorded in the run."""
    trained = resolve(ProgramTraining, RunFolder.open(run).config)
    programs = held_out_programs(trained.data, "test", trained.train.seed)
    chosen = max(programs, key=lambda program: len(program.source))
    values = look_at_pair(load_translator(run), chosen.pair, LazyPlot(run))
    keep_record(run, TOKENS, values)
    return chosen
