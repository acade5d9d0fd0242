"""`compression="auto"`: which compressor each bucket gets in each step.

`policy` holds the numerics (what the link is like now, what a choice would cost, which is best), `chooser` what is
kept and measured from step to step, `clock` how time is taken inside the graph, `report` what users are told.
"""
