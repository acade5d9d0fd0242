"""Pure numeric functions that the compressors share: tensors in, tensors out, no state.

The loops over whole buckets are compiled with XLA (`compile.compiled`); plain TensorFlow ops
remain where XLA is slower (joining and cutting payloads, compaction, scatter).
"""
