"""The operator: MSJob and MsrunJob objects of a Kubernetes cluster become running jobs.

Decisions are pure: `msjob` and `msrunjob` take an object, what exists of it, and the time, and
return what to create and delete and the new status (`decision`).  `serve` watches, acts and writes.

The rules that make the operator safe to kill at any moment, and to run twice by mistake:

- Names are deterministic, so what exists already is not made again.
- The status is written first, under the version that the decision was made for.  Who decided on an
  older version has its write refused, and decides again; nothing was done yet.
- Every object has an owner, so what is left of a deleted job goes without the operator.
"""
