"""`compression="auto"`: which compressor each bucket gets in each step.

`policy` holds the numerics (what a choice would cost, which is best), with `link` (what it is like now), `trials`, and
`all_at_once` (candidates for all buckets or none); `selector` what is kept and measured from step to step, `probe` how
much candidates let through, `clock` how time is taken inside the graph, `report` what users are told.
"""
