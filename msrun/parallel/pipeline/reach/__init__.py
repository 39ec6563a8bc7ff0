"""Which parameters of a stage have a gradient: those that the loss depends on, as in one process.

The problem.  A value may cross the end of a stage and not be used by the loss, or in some steps
only.  In one process what computed it then has no gradient, and an optimizer leaves it alone.  A
stage before the last cannot know: torch's schedules send zeros where there is no gradient, those
make gradients of zeros, and weight decay or momentum change parameters that nothing trains.

The idea.  Zeros flow as before, and gradients that come from them alone are dropped at the end of
the step.

- The first step of autograd behind each received value notes whether a gradient came
  (`BorderReach.watch`).  If all came, in all chunks and micro-batches, then by induction from the
  last chunk to the first the loss depends on all that was sent, and nothing is to be done.
- How many did not is one number in the all-reduce that a step has anyway, so all ranks know in the
  same step, and a step without any costs nothing more.
- Otherwise each chunk says, for each micro-batch, which received values each sent one depends on.
  One exchange over the stages has it all, and each rank computes what the loss depends on.
  Parameters that are reached from other sent values alone lose their gradients, if that holds for
  all data-parallel ranks, and for all stages that share a weight.

Invariants.

- A gradient is only dropped, never changed, and only one that would be none in one process.
- It is done after gradients are reduced and before hooks of parameters, clipping and the optimizer.
- What depends on what is read from autograd's graph of this step; nothing is remembered, so uses
  may change with each step.  The graph's nodes are kept to the end of the step where several sent
  values need gradients; autograd frees what they saved as always.
"""
