"""A stand-in for a Kubernetes cluster, for tests with the real kubectl, client and kopf.

    with Cluster(tmp_path) as cluster:                    # an API server and its controllers
        cluster.kubectl("apply", "-f", "job.yaml")

    with Lab(tmp_path) as lab, Cluster(tmp_path, lab, nodes={"n0": {}, "n1": {}}) as cluster:
        ...                                               # and kubelets: pods are processes

The server speaks Kubernetes' HTTP API in JSON (`server.py`) over one store of objects
(`store.py`); controllers and kubelets are threads that work on that store.  Every pod is a host
of the lab, with its own network, process numbers, host name and /tmp; its "image" is this
machine's file system.  Time is short here: what waits for seconds in a cluster, such as the
back-off of a restart, waits for a tenth of that.

What it does not have: protobuf, kube-proxy (the name of a Service leads to pods directly), images,
admission by webhook, priorities.
"""
