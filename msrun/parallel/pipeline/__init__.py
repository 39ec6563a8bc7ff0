"""Pipeline parallel: a model cut into stages that work on micro-batches one after the other.

The problem.  Layers are spread over ranks along the mesh axis `pp`.  The model is an unmodified
`nn.Module` that knows nothing of it, and everything else must go on working inside a stage:
operator plans by module name, recomputation, `fully_shard`, optimizer parallel, checkpoints.

The idea.  A stage is a part of the model's own module tree.

- `record` runs `forward` once on a copy without values (`skeleton`), down to the modules that have
  stages, and leaves those as they are; `split` assigns each step to a chunk and makes one small
  program for each chunk.  Without a sample `trace` finds with `torch.fx` which modules are called,
  and `forward` is recorded at the first batch: what runs is always recorded.
- `tree` grafts the modules of a stage into a new tree under the names that they had, and frees what
  other stages own.  `PipelineModel` is that tree.
- torch's schedules move tensors and keep the order of work.  They see a `Runner` for each chunk and
  get no inputs: it knows the order of its micro-batches.  Shapes, losses and tied weights are ours.
- A value that a later chunk uses is sent through all chunks in between, so skip connections work.
  Inputs of the model are read on every rank and never sent.
- `recordings` keeps one recording for each shape of micro-batch, mode and set of plain values, with
  what chunks send (`border`).  All ranks make the same from the same shapes, without a message.  A
  module that needs values to run is run on zeros for the shapes of its outputs.
- `reach` notes which received values got a gradient, and drops gradients of zeros.
- Micro-batches have equal shapes: a short one repeats its last sample, which counts nothing.

Invariants.

- The loss is the mean over the samples of the batch, and gradients are those of one process: each
  micro-batch has the share of its samples, repeated ones excluded.
- A weight in several stages has equal copies.  Its gradients are added in the order of stages,
  after those over data-parallel ranks, so copies stay equal to the last bit.
- What is sent is dense, replicated and of the shape that the receiver expects.
- Parameters that the loss does not depend on have no gradient after `settle`.
- Gradients come from `train_step` alone; a call of the model runs forward only (`inference`).
- Zero-bubble schedules compute gradients of weights apart, by a way of torch that calls no hook of
  a parameter.  That is used only where nothing depends on those hooks in the middle of a step.

What was tried and lost.  The programs of a symbolic trace: it stops at the first branch on a shape,
which is in every model of transformers, and it drops gradient modes, autocast and plain values
without a word.  `torch.distributed.pipelining.pipeline` traces into interpreter modules:
a plan for `nn.Linear` finds none, names and hooks are gone, and gradients of tied weights are not
summed.  Stage modules that the user writes: the model would know of parallelism.  A list of what
each stage holds kept every parameter of the model alive on every rank; it is cleared once the
stage is there.  Gradients of sharded weights were computed together with those of inputs, because
of hooks, and zero-bubble schedules gained nothing; sums over ranks now follow the schedule.

`model.split_model` is the entry.  Importing this package imports no torch; `balance`, `chunks` and
`timeline` never do.
"""
