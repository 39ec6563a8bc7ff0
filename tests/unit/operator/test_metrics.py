"""What Prometheus reads, whole."""

from launchers.operator.metrics import OperatorMetrics


def test_the_text_of_all_metrics():
    metrics = OperatorMetrics()
    metrics.lead(is_leader=True)
    metrics.note_job(("v1", "ns", "a"), "MSJob", "Pending")
    metrics.note_job(("v1", "ns", "a"), "MSJob", "Running")
    metrics.note_job(("v1", "ns", "b"), "MSJob", "Running")
    metrics.note_job(("v1", "ns", "c"), "MsrunJob", 'a "b"\\')
    metrics.note_job(("v1", "ns", "d"), "MsrunJob", "Failed")
    metrics.note_job(("v1", "ns", "d"), "MsrunJob", None)
    metrics.note_look("MSJob", "ok", 0.02)
    metrics.note_look("MSJob", "conflict", 5.0)
    metrics.note_action("Create")
    assert (
        metrics.render()
        == """\
# HELP msrun_operator_leader Whether this operator works: 1, or waits: 0.
# TYPE msrun_operator_leader gauge
msrun_operator_leader 1
# HELP msrun_operator_jobs Jobs by kind and phase.
# TYPE msrun_operator_jobs gauge
msrun_operator_jobs{kind="MSJob",phase="Running"} 2
msrun_operator_jobs{kind="MsrunJob",phase="a \\"b\\"\\\\"} 1
# HELP msrun_operator_looks_total Looks at a job, by kind and by how they ended.
# TYPE msrun_operator_looks_total counter
msrun_operator_looks_total{kind="MSJob",result="conflict"} 1
msrun_operator_looks_total{kind="MSJob",result="ok"} 1
# HELP msrun_operator_look_seconds Seconds that a look at a job took.
# TYPE msrun_operator_look_seconds histogram
msrun_operator_look_seconds_bucket{le="0.01"} 0
msrun_operator_look_seconds_bucket{le="0.03"} 1
msrun_operator_look_seconds_bucket{le="0.1"} 1
msrun_operator_look_seconds_bucket{le="0.3"} 1
msrun_operator_look_seconds_bucket{le="1"} 1
msrun_operator_look_seconds_bucket{le="3"} 1
msrun_operator_look_seconds_bucket{le="10"} 2
msrun_operator_look_seconds_bucket{le="+Inf"} 2
msrun_operator_look_seconds_count 2
msrun_operator_look_seconds_sum 5.02
# HELP msrun_operator_actions_total What was done in the cluster, by action.
# TYPE msrun_operator_actions_total counter
msrun_operator_actions_total{action="Create"} 1
"""
    )
    metrics.lead(is_leader=False)
    assert "msrun_operator_jobs{" not in metrics.render()
