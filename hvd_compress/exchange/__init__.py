"""How payloads cross ranks: one file per collective, and `choice`, which picks one for each bucket.

A `Collective` knows the bytes it sends, its cost phases and how to reduce a bucket. Importing the collectives needs
neither TensorFlow nor Horovod; only their `reduce` does. Each payload carries a flag that says whether the gradients
of its rank are finite. If those of any rank are not, the result is NaN on every rank. Gradients of embeddings are
exchanged row by row, in `engine.embeddings`.
"""
