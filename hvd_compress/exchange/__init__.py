"""How payloads cross ranks: one file per pattern, and `choice` between them.

Each pattern has `reduce`, which encodes a bucket's chunks, exchanges and decodes them, and `bytes_sent`. With
what each rank sends travels a flag, whether its gradients are finite; if any rank's are not, the result is NaN
on every rank, whatever the codes would have decoded to. Rows of embeddings cross by a way of their own, `slices`.
"""
