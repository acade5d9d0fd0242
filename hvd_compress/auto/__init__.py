"""`compression="auto"`: which compressor each bucket gets in each step.

- `start` makes the selector: it predicts what each candidate costs and makes the first choice.
- `predictions` holds what candidates are expected to cost and to gain.
- `selector` holds the selector: its variables, and what it does in each step. `step_numbers` packs and unpacks the
  numbers that the ranks send each other.
- `traces` decides which candidates the steps are traced with, and when others are added. `comparisons` decides when it
  looks at the others, `trace_worth` whether a new trace pays, and `rows` predicts what it saves to compress the rows of
  embeddings.
- `policy` holds the numerics: which choice is best. `link_tracker` (how fast the link is now), `trials` (how wrong
  predictions are) and `choices` (which choices are compared, and what each costs) belong to it.
- `progress` estimates how much progress a step makes with each candidate, from what `progress_sample` measures on parts
  of the gradients (`gradient_parts`); `usual_progress` is what it usually is.
- `round_length` chooses the number of local steps, and `delay_choice` when a delay begins; `step_times` splits the time
  of a step for both `selector` and `delay_choice`.
- `flat_or_hierarchical` decides which compressors use the hierarchical exchange.
- `report` tells users what was chosen, and why.
"""
