"""A forward recorded as it runs once, on a copy of the model without values.

The problem.  A stage needs the part of `forward` between the modules that have stages.  A symbolic
trace stops at the first `if x.shape[0] > 1` and drops what is no operation: gradient modes,
autocast, plain values that decide about the flow.

The idea.  The model's own code runs, and `Recorder` notes each torch function and each call of a
unit (a module that is one step) in order.  Shapes, flags and configuration are concrete, so one
recording holds for one shape of inputs, one mode and one set of plain values; others are recorded
anew, by all ranks alike.  `structure` has nested values, and `modes` gradient and autocast modes.

Invariants.

- A tensor of the forward comes from a step, an input or the model.  One of unknown origin, a value
  that is read, an object that is no plain value: the forward is refused with the line.
- Steps that write in place keep their order with all steps that use the same memory.
- Random numbers of steps are drawn by the stage that runs the step, anew in each micro-batch.
"""
