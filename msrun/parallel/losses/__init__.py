"""The loss of one process over parts of its batch, and batches of any structure.

The problem.  Each rank and each micro-batch has a part of the batch.  The mean of the losses of the
parts is the loss of the batch only if every part has equally many terms.  It has not if some
targets are ignored or classes have weights, and a sum is no mean at all.

The idea.  The loss of a part becomes a sum and a count.  Sums and counts are added over parts and
ranks, and divided once.  A script returns the two itself, or `watch` finds them: it sees which
functions of torch the loss is made of.  `tally` adds them up and scales gradients.
`sample_watch` notices a model that mixes samples before there is a loss, and `decisions` one that
decides by values of a part.  `batch` cuts, moves and passes on what scripts have as a batch.

`step` and `pipeline` are the users of this package.
"""
