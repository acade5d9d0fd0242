"""Pure functions on tensors that the compressors share.

Loops over whole buckets are compiled with XLA (`compile.compiled`). Plain TensorFlow operations are used where XLA is
slower: joining and splitting payloads, compaction, scatter.
"""
