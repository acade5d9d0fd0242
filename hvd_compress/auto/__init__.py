"""`compression="auto"`: which compressor each bucket gets in each step.

- `start` makes the selector: it predicts what each candidate costs and makes the first choice.
- `selector` holds the selector: its variables, and what it measures in each step.
- `policy` holds the numerics: which choice is best. `link_tracker` (how fast the link is now), `trials` (how wrong
  predictions are), `model_wide` (candidates for all buckets or none) and `choices` (which choices are compared, and
  what each costs) belong to it.
- `progress` measures how much progress a step makes with each candidate; `usual_progress` is what it usually is.
- `flat_or_hierarchical` decides which compressors use the hierarchical exchange.
- `report` tells users what was chosen, and why.
"""
