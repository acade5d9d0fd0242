"""What users call: Keras optimizer and callbacks, tape, `allreduce`, elastic jobs, residual checkpoints."""
